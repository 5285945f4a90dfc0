"""What the documentation says about the code is what the code says."""

from pathlib import Path

from weightload.states import transitions_table

ROOT = Path(__file__).parents[2]


def test_the_reference_shows_the_table_of_moves_that_the_code_has():
    """A move that is added or taken away must show in the reference."""
    assert transitions_table() in (ROOT / "docs/reference/states.md").read_text()


def test_every_link_of_the_documentation_leads_somewhere():
    """A relative link in a Markdown file names a file or folder of the repository."""
    import re

    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
