"""Local variables that are written before they are read again are told from those that are not."""

import functools
import itertools
import sys

import pytest

from weightload.frames import local_values


class Item:
    pass


def held(consume):
    """Return how many dead variables hold each of three items when the next one is asked for."""
    counts = []

    def source():
        for number in range(3):
            yield f"a.{number}", Item()
            found = local_values(sys._getframe(1), dead=True)
            pairs = [inner for value in found if isinstance(value, tuple) for inner in value]
            counts.append(sum(isinstance(value, Item) for value in (*found, *pairs)))

    consume(source())
    return counts


def loop(pairs):
    for _name, _item in pairs:
        pass


def whole_pairs(pairs):
    for pair in pairs:
        _name, _item = pair


def renamed(pairs):
    loop((f"{name}.x", item) for name, item in pairs)


def asked_one_by_one(pairs):
    while True:
        try:
            _name, _item = next(pairs)
        except StopIteration:
            return


def passed_on(pairs):
    def inner():
        yield from pairs

    loop(inner())


def grouped(pairs):
    named = ((name.split("."), item) for name, item in pairs)
    for _, group in itertools.groupby(named, key=lambda pair: pair[0][0]):
        for _parts, _item in group:
            pass


def listed(pairs):
    return list(pairs)


def read_later(pairs):
    before = None
    for _name, item in pairs:
        if before is not None:
            str(before)
        before = item


def read_after_the_loop(pairs):
    for _name, item in pairs:  # noqa: B007 (it is used, after the loop)
        pass
    return item


def read_in_a_handler(pairs):
    try:
        for _name, item in pairs:  # noqa: B007 (it is used, in the handler)
            pass
    except ValueError:
        print(item)


def shared_with_a_closure(pairs):
    for _name, item in pairs:
        functools.partial(lambda: item)  # noqa: B023 (that is the point)


def looked_at_by_name(pairs):
    for _name, _item in pairs:
        locals()


@pytest.mark.parametrize(
    ("consume", "counts"),
    [
        (loop, [1, 1, 1]),
        (whole_pairs, [2, 2, 2]),
        (renamed, [2, 2, 2]),
        (asked_one_by_one, [1, 1, 1]),
        (passed_on, [1, 1, 1]),
        (grouped, [2, 2, 2]),
        (listed, [0, 0, 0]),
        (read_later, [1, 1, 1]),  # the loop's own variable, and not `before`
        (read_after_the_loop, [0, 0, 0]),
        (read_in_a_handler, [0, 0, 0]),
        (shared_with_a_closure, [0, 0, 0]),
        (looked_at_by_name, [0, 0, 0]),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_only_what_nobody_will_read_is_dead(consume, counts):
    assert held(consume) == counts


def test_all_variables_are_found_if_asked_for():
    item = Item()
    again = [item]
    found = local_values(sys._getframe(0), dead=False)
    assert (found.count(item), found.count(again)) == (1, 1)


def test_the_walk_ends_at_the_floor():
    def inner():
        return local_values(sys._getframe(0), floor=(__name__,), dead=False)

    assert inner() == []


def test_looking_leaves_no_reference_behind():
    item = Item()
    before = sys.getrefcount(item)
    found = local_values(sys._getframe(0), dead=False)
    assert sys.getrefcount(item) == before + 1
    del found
    assert sys.getrefcount(item) == before
