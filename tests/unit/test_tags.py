"""Every change of a dictionary gives it another tag, and nothing else does."""

import copy
import pickle
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from weightload.tags import tags_of

KEYS = st.sampled_from("abc")
NEW = object()

CHANGES = {
    "set": lambda d, k: d.__setitem__(k, NEW),
    "add": lambda d, k: d.__setitem__(k + k, NEW),
    "delete": lambda d, k: d.__delitem__(k),
    "pop": lambda d, k: d.pop(k),
    "popitem": lambda d, k: d.popitem(),
    "clear": lambda d, k: d.clear(),
    "update": lambda d, k: d.update({k: NEW}),
    "merge": lambda d, k: d.__ior__({k: NEW}),
    "setdefault": lambda d, k: d.setdefault(k + k, NEW),
}
LOOKS = {
    "get": lambda d, k: d[k],
    "default": lambda d, k: d.setdefault(k, NEW),
    "copy": lambda d, k: d.copy(),
    "deepcopy": lambda d, k: copy.deepcopy(d),
    "pickle": lambda d, k: pickle.dumps(d),
    "items": lambda d, k: [*d.items()],
    "update with nothing": lambda d, k: d.update({}),
    "pop nothing": lambda d, k: d.pop("none", None),
}


@given(st.sampled_from(sorted(CHANGES)), KEYS, st.booleans())
def test_a_change_gives_another_tag(change, key, of_an_object):
    holder = type("Holder", (), {})()
    mine = vars(holder) if of_an_object else {}
    mine.update(a=1, b=[2], c="3")
    other = dict(mine)
    before, others = tags_of([mine]), tags_of([other])
    CHANGES[change](mine, key)
    assert tags_of([mine]) != before
    assert tags_of([other]) == others


@given(st.sampled_from(sorted(LOOKS)), KEYS)
def test_a_look_does_not(look, key):
    mine = {"a": 1, "b": [2], "c": "3"}
    before = tags_of([mine])
    LOOKS[look](mine, key)
    assert tags_of([mine]) == before


def test_no_two_dictionaries_have_one():
    dicts = [{} for _ in range(100)] + [{"a": 1} for _ in range(100)]
    dicts += [dict(one) for one in dicts]
    tags = tags_of(dicts)
    assert len({*tags}) == len(tags)


def test_a_dictionary_in_the_memory_of_another_has_another():
    seen = set()
    for _ in range(1000):
        one = {"a": 1}
        (tag,) = tags_of([one])
        assert tag not in seen
        seen.add(tag)
        del one


def test_attributes_that_running_code_sets_are_seen_however_often():
    """The interpreter writes attributes past the dictionary's functions where it knows the place."""
    module = nn.Linear(2, 2)
    module.count = 0

    def step(value):
        module.count = value

    for value in range(1, 5000):
        before = tags_of([vars(module)])
        step(value)
        assert tags_of([vars(module)]) != before


@pytest.mark.parametrize("name", ["_of", "_locked"])
def test_without_a_count_there_are_no_tags(monkeypatch, name):
    monkeypatch.setattr("weightload.tags." + name, None if name == "_of" else lambda: False)
    assert tags_of([{}]) is None


def test_torch_counts_here():
    assert tags_of([{}]) is not None, (sys.version, torch.__version__)
