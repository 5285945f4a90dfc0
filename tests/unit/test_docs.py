"""What the documentation says about the code is what the code says."""

from pathlib import Path

from weightload.refusals import refusals_table
from weightload.states import transitions_table

ROOT = Path(__file__).parents[2]


def test_the_reference_shows_the_table_of_moves_that_the_code_has():
    """A move that is added or taken away must show in the reference."""
    assert transitions_table() in (ROOT / "docs/reference/states.md").read_text()


def test_the_reference_shows_what_is_refused():
    """A refusal without a reason in the reference is a surprise."""
    assert refusals_table() in (ROOT / "docs/reference/refusals.md").read_text()


def test_every_link_of_the_documentation_leads_somewhere():
    """A relative link in a Markdown file names a file or folder of the repository."""
    import re

    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_engine_that_is_started_for_reloads_has_the_methods_in_its_workers():
    """vLLM puts the engine into a process of its own, where only methods of the worker are reached."""
    import re

    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for call in re.findall(r"\bLLM\(([^)]*load_format=[^)]*)\)", page.read_text()):
            assert "weightload.vllm.WorkerExtension" in call or "GuardedWorker" in call, page


def rows_of_the_house():
    """Return the row of each room, as the page about the rooms has it."""
    import re

    page = (ROOT / "docs/explanation/house.md").read_text()
    return {
        room: int(row)
        for row, rooms in re.findall(r"^\| (\d+) \| (.+) \|$", page, re.MULTILINE)
        for room in re.findall(r"`(\w+)`", rooms)
    }


def test_every_room_stands_in_the_table():
    """A module that is added needs a row, and a row needs a module."""
    files = {path.stem for path in (ROOT / "weightload").glob("*.py")} - {"__init__", "cli"}
    assert rows_of_the_house().keys() == files


def test_every_room_imports_only_from_rows_above_its_own():
    """An import that points down or sideways would tie two rooms into a knot."""
    import ast

    rows = rows_of_the_house()
    for room, row in rows.items():
        tree = ast.parse((ROOT / "weightload" / f"{room}.py").read_text())
        lazy = {
            id(inner)
            for node in ast.walk(tree)
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
            for inner in ast.walk(node)
        }
        for node in ast.walk(tree):
            if id(node) in lazy or not isinstance(node, ast.ImportFrom):
                continue
            names = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
            for name in names:
                package, _, rest = name.partition(".")
                other = rest.partition(".")[0]
                if package == "weightload" and other in rows:
                    assert rows[other] < row, f"{room} imports {other}"
