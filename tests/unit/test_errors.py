"""Errors are sorted by who has to act, hold plain data only, and cross processes."""

import json
import pickle

import pytest

from weightload import errors
from weightload.errors import WeightLoadError, name_some

CLASSES = [getattr(errors, name) for name in errors.__all__ if name.endswith("Error")]


def drawn():
    """Read child and parent of each class out of the tree in the module's docstring."""
    parents, path = {}, []
    for line in errors.__doc__.splitlines():
        bare = line.strip(" │├└─")
        name = bare.split(" ")[0]
        if not name.endswith("Error") or not line.startswith("    "):
            continue
        depth = (len(line) - len(line.lstrip(" │├└─"))) // 4 - 1
        del path[depth:]
        parents[name] = path[-1] if path else None
        path.append(name)
    return parents


def test_the_tree_in_the_docstring_is_the_tree_of_classes():
    actual = {
        cls.__name__: cls.__mro__[1].__name__ if cls is not WeightLoadError else None
        for cls in CLASSES
    }
    assert drawn() == actual


@pytest.mark.parametrize("cls", CLASSES)
def test_every_error_survives_pickling(cls):
    error = cls("what happened", model_intact=False, names=["a", "b"], count=2)
    error.add_note("and a note")
    error.__cause__ = ValueError("stays behind")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is cls
    assert str(again) == "what happened"
    assert again.model_intact is False
    assert again.facts == {"names": ["a", "b"], "count": 2}
    assert again.__notes__ == ["and a note"]
    assert again.__cause__ is None


@pytest.mark.parametrize("cls", CLASSES)
def test_every_error_survives_the_way_through_plain_data(cls):
    error = cls("what happened", expected=(1, 2), deep={1: {3}}, other=object)
    error.add_note("and a note")
    again = WeightLoadError.from_plain(json.loads(json.dumps(error.to_plain())))
    assert type(again) is cls
    assert str(again) == "what happened"
    assert again.model_intact is True
    assert again.facts == {"expected": [1, 2], "deep": {"1": [3]}, "other": "<class 'object'>"}
    assert again.__notes__ == ["and a note"]


@pytest.mark.parametrize(
    "key", ["message", "model_intact", "facts", "self", "args", "a b", "__notes__"]
)
@pytest.mark.parametrize("cls", CLASSES)
def test_no_name_of_a_fact_hides_the_error_that_came_from_afar(cls, key):
    """Another process says what its facts are called; what went wrong there has to reach the caller."""
    plain = {**cls("what happened", model_intact=False).to_plain(), "facts": {key: 3}}
    again = WeightLoadError.from_plain(plain)
    assert type(again) is cls
    assert str(again) == "what happened"
    assert again.model_intact is False
    assert again.facts == {key: 3}
    assert pickle.loads(pickle.dumps(again)).facts == {key: 3}
    assert WeightLoadError.from_plain(again.to_plain()).facts == {key: 3}


def test_an_error_of_a_newer_version_is_still_an_error():
    plain = {**WeightLoadError("text").to_plain(), "type": "ErrorOfTomorrow"}
    assert type(WeightLoadError.from_plain(plain)) is WeightLoadError


@pytest.mark.parametrize("cls", CLASSES)
def test_every_error_is_public_and_says_what_it_means(cls):
    import weightload

    assert getattr(weightload, cls.__name__) is cls
    assert cls.__doc__.strip().endswith(".")
    assert cls("text").model_intact is True, "intact unless somebody says otherwise"


def test_at_most_ten_names_are_shown():
    assert name_some(f"n{i}" for i in range(10)) == ", ".join(f"n{i}" for i in range(10))
    assert name_some(f"n{i}" for i in range(13)).endswith("n9 and 3 more")
    assert name_some([]) == ""
