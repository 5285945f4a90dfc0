"""Every defect of the catalogue is held by a test, and the reference says by which."""

import ast

import pytest
from catalogue import PAGE, Holder, marked_tests, page, problems


def test_every_row_has_a_test_or_a_reason_and_every_marker_a_row():
    """A row that nothing holds, and a marker that names no row, are mistakes."""
    assert problems() == []


def test_the_page_is_what_the_tests_say():
    """``python -m tests.catalogue --write`` brings it up to date."""
    assert PAGE.read_text(encoding="utf-8") == page()


MARKED = """
import pytest
pytestmark = pytest.mark.holds("A")
CASES = [pytest.param(1, marks=pytest.mark.holds("B")), 2]

@pytest.mark.holds("C", "D")
@pytest.mark.parametrize("x", CASES)
def test_one(x): ...

@pytest.mark.holds("E")
class TestAll:
    @pytest.mark.parametrize("x", [pytest.param(1, marks=[pytest.mark.holds("F")])])
    def test_two(self, x): ...
"""


def test_markers_are_found_wherever_pytest_takes_them():
    """On functions, classes, whole files and single parameters."""
    assert list(marked_tests("t.py", ast.parse(MARKED))) == [
        (Holder("t.py", ""), ["A"]),
        (Holder("t.py", "test_one"), ["C", "D", "B"]),
        (Holder("t.py", "TestAll"), ["E"]),
        (Holder("t.py", "TestAll::test_two"), ["F"]),
    ]


@pytest.mark.parametrize(
    "code", ['CASES = [pytest.mark.holds("A")]', 'def helper():\n    pytest.mark.holds("A")']
)
def test_a_marker_that_marks_no_test_is_a_mistake(code):
    """It would hold nothing."""
    with pytest.raises(ValueError, match=r"t\.py has a marker"):
        list(marked_tests("t.py", ast.parse(code)))
