"""The core needs no framework, and its lowest rooms need no torch."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import weightload

ROOT = Path(weightload.__file__).parent
# The command line is an application on top of the core and the adapters.
CORE = sorted(path for path in ROOT.glob("*.py") if path.stem != "cli")
KIT = sorted((ROOT / "testing").glob("*.py"))
WITHOUT_TORCH = ("errors", "states", "ledger", "registry", "receipt", "ownership")


def imported(path, *, typing=False):
    """Return the names of the modules that a file imports; those for type checkers if asked."""
    tree = ast.parse(path.read_text())
    skipped = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test) and not typing:
            skipped |= {id(inner) for statement in node.body for inner in ast.walk(statement)}
    names = set()
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def first(names):
    return {name.split(".")[0] for name in names}


@pytest.mark.parametrize("path", [*CORE, *KIT], ids=lambda path: path.stem)
def test_no_module_of_the_core_imports_a_framework(path):
    names = imported(path, typing=True)
    assert not {"vllm", "transformers"} & first(names)
    assert not any(name.startswith("weightload.vllm") for name in names)


@pytest.mark.parametrize("name", WITHOUT_TORCH)
def test_the_lowest_rooms_import_no_torch(name):
    assert "torch" not in first(imported(ROOT / f"{name}.py"))


@pytest.mark.parametrize("name", WITHOUT_TORCH)
def test_the_lowest_rooms_import_only_one_another(name):
    inner = {
        part.split(".")[1]
        for part in imported(ROOT / f"{name}.py")
        if part.startswith("weightload.")
    }
    assert inner <= {"errors", "states"} - {name}


@pytest.mark.parametrize("path", CORE, ids=lambda path: path.stem)
def test_the_core_does_not_need_its_test_kit(path):
    assert not any(name.startswith("weightload.testing") for name in imported(path))


def test_the_core_works_where_no_framework_can_be_imported():
    """Every module is imported, and a model is loaded twice, with vllm blocked."""
    program = """
import importlib, pathlib, sys
for name in ("vllm", "transformers", "safetensors", "hypothesis", "pytest"):
    sys.modules[name] = None
import weightload
root = pathlib.Path(weightload.__file__).parent
optional = {"__main__", "cli"}
for path in sorted(root.glob("*.py")):
    if path.stem not in optional:
        importlib.import_module(f"weightload.{path.stem}".removesuffix(".__init__"))
from weightload.testing import TOYS, Bench
bench = Bench(TOYS["tied"])
bench.reload(bench.state(2))
print("loaded")
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=300,
        env={"PYTHONPATH": str(ROOT.parent), "PATH": ""},
    )
    assert done.stdout == "loaded\n", done.stderr


def test_everything_public_is_there():
    for name in weightload.__all__:
        assert getattr(weightload, name) is not None
    assert sorted(weightload.__all__) == weightload.__all__


def test_the_type_marker_is_shipped():
    """Users' type checkers look for it."""
    assert (ROOT / "py.typed").exists()
