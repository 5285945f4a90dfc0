"""What came over a wire is what was sent, or it is refused before any of it is loaded.

A bucket whose bytes or record changed on the way, came again, was left out, came in another order, or
tells lies about shapes, types or counts: each would put wrong values into a model, silently. The
yardstick is what was packed, compared bit for bit.
"""

import copy
import json
from pathlib import Path

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from weightload import TransportError, UsageError
from weightload.arena import Arena
from weightload.wire import BucketReader, BucketWriter, forms_of

CAPACITY = 256

TENSORS = {
    "matrix": torch.arange(15.0).view(3, 5),
    "larger than a bucket": torch.arange(300).bfloat16(),
    "nothing": torch.empty(0, 3),
    "a number": torch.tensor(3.0),
    "flags": torch.tensor([True, False, True]),
    "transposed": torch.arange(12.0).view(3, 4).t(),
    "bytes": torch.arange(64, dtype=torch.uint8),
    "twin 1": torch.ones(4),
    "twin 2": torch.ones(4) * 2,
}


def sent(tensors=TENSORS, *, announced=True, capacity=CAPACITY):
    """Pack tensors and return opening, buckets with their bytes, and closing, as JSON brings them."""
    memory = torch.full((capacity,), 7, dtype=torch.uint8)
    writer = BucketWriter(memory, forms=forms_of(tensors) if announced else None, version=3)
    opening = writer.opening()
    buckets = [(record, memory.clone()) for record in writer.fill(tensors.items())]
    return json.loads(json.dumps([opening])), [
        (json.loads(json.dumps(record)), octets) for record, octets in buckets
    ], json.loads(json.dumps(writer.closing()))  # fmt: skip


def received(opening, buckets, closing, *, capacity=CAPACITY):
    reader = BucketReader(opening, capacity)
    found = {}
    for record, octets in buckets:
        found.update((name, tensor.clone()) for name, tensor in reader.take(record, octets))
    reader.close(closing)
    return found


@pytest.mark.holds("I07")
@pytest.mark.parametrize("announced", [True, False])
@pytest.mark.parametrize("capacity", [64, 128, 256, 1 << 16])
def test_what_is_unpacked_is_what_was_packed(capacity, announced):
    [opening], buckets, closing = sent(announced=announced, capacity=capacity)
    found = received(opening, buckets, closing, capacity=capacity)
    assert list(found) == list(TENSORS)
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        assert torch.equal(found[name], tensor), name


def test_memory_is_bounded_by_the_bucket_whatever_comes():
    """A tensor larger than a bucket travels in parts: the memory that is shared does not grow."""
    _, buckets, _ = sent()
    assert len(buckets) > 3
    assert all(record["nbytes"] <= CAPACITY for record, _ in buckets)


[OPENING], BUCKETS, CLOSING = sent()


@given(data=st.data())
def test_no_flipped_bit_of_a_bucket_is_loaded(data):
    index = data.draw(st.integers(0, len(BUCKETS) - 1))
    buckets = [(record, octets.clone()) for record, octets in BUCKETS]
    record, octets = buckets[index]
    place = data.draw(st.integers(0, record["nbytes"] - 1))
    octets[place] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(TransportError, match=f"Bucket {index} has the digest"):
        received(OPENING, buckets, CLOSING)


def paths_in(value, path=()):
    yield path
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, inner in items:
            yield from paths_in(inner, (*path, key))


def at(value, path):
    for key in path:
        value = value[key]
    return value


WORLD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 400),
    st.sampled_from(["", "float32", "bfloat16", "nn", "matrix", "twin 1", OPENING["update"]]),
    st.lists(st.integers(-1, 5), max_size=3),
    st.dictionaries(st.sampled_from(["matrix", "x"]), st.integers(), max_size=2),
)


def changed(data, thing):
    """Return a copy in which one value, deep inside, is another one, or is gone."""
    thing = copy.deepcopy(thing)
    path = data.draw(st.sampled_from([path for path in paths_in(thing) if path]))
    parent = at(thing, path[:-1])
    if data.draw(st.booleans()) and isinstance(parent, dict | list):
        del parent[path[-1]]
    else:
        value = data.draw(WORLD)
        assume(json.dumps(value) != json.dumps(parent[path[-1]]))
        parent[path[-1]] = value
    return thing


@given(data=st.data())
def test_no_record_that_was_changed_is_believed(data):
    """Any value of any record, replaced by another one or left out, ends in a TransportError, and
    no tensor of the bucket that it is about has been handed out by then."""
    index = data.draw(st.integers(0, len(BUCKETS) - 1))
    reader = BucketReader(OPENING, CAPACITY)
    for record, octets in BUCKETS[:index]:
        reader.take(record, octets)
    record, octets = BUCKETS[index]
    with pytest.raises(TransportError):
        reader.take(changed(data, record), octets)
    for record, octets in BUCKETS[index:]:
        reader.take(record, octets)  # what was refused has left nothing behind
    with pytest.raises(TransportError):
        reader.close(changed(data, CLOSING))
    reader.close(CLOSING)


@given(data=st.data())
def test_an_opening_that_was_changed_does_not_go_with_what_comes(data):
    opening = changed(data, OPENING)
    assume(opening.get("version", 3) in (None, 3) or not isinstance(opening["version"], int | str))
    assume("version" not in opening or opening["version"] == 3)
    assume(opening.get("forms", 0) is not None)
    with pytest.raises(TransportError):
        received(opening, BUCKETS, CLOSING)


@pytest.mark.parametrize(
    ("order", "said"),
    [
        ([0, 0, 1], "Bucket 0 came again; bucket 1 was expected"),
        ([0, 2], "Bucket 2 came, and those before it were left out; bucket 1 was expected"),
        ([1], "Bucket 1 came, and those before it were left out; bucket 0 was expected"),
    ],
)
def test_a_bucket_that_comes_twice_or_out_of_order_is_named(order, said):
    with pytest.raises(TransportError, match=said):
        received(OPENING, [BUCKETS[index] for index in order], CLOSING)


def test_an_update_that_lacks_its_last_bucket_is_not_closed():
    with pytest.raises(TransportError, match=f"closed the update with buckets {len(BUCKETS)}"):
        received(OPENING, BUCKETS[:-1], CLOSING)


def test_a_bucket_of_another_update_is_refused():
    _, [foreign, *_], _ = sent()
    with pytest.raises(TransportError, match="came into update"):
        received(OPENING, [foreign], CLOSING)


def lie(tensors, capacity=1 << 12, **changes):
    """Pack tensors as a sender that tells lies about the first one and seals them properly."""
    from weightload import wire

    [opening], [(record, octets)], closing = sent(tensors, announced=False, capacity=capacity)
    fields = ("name", "dtype", "shape", "offset", "begin", "length")
    true = zip(fields, record["rows"][0], strict=True)
    record["rows"][0] = [changes.get(field, value) for field, value in true]
    body = {key: value for key, value in record.items() if key != "digest"}
    record["digest"] = wire._mark(body, octets[: record["nbytes"]])
    closing["digest"] = wire._chained("", record["digest"])
    return opening, [(record, octets)], closing


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"shape": [3, 6]}, r"shape \[3, 6\] of float32 takes 72 bytes; the row brings"),
        ({"shape": [3, -5]}, "a shape is a list of whole numbers"),
        ({"shape": [True, 5]}, "a shape is a list of whole numbers"),
        ({"shape": [0, 5]}, "takes 0 bytes; the row brings"),
        ({"dtype": "float64"}, "of float64 takes 120 bytes; the row brings"),
        ({"dtype": "Tensor"}, "'Tensor' is no dtype"),
        ({"dtype": "nn.Module"}, "is no dtype"),
        ({"offset": 4}, "the offset a multiple of 64"),
        ({"offset": 128}, "expected within 0 to"),
        ({"length": 4096}, "the row brings"),
        ({"begin": 4, "length": 56}, "bytes 0 to 4 never came"),
        ({"name": "flags"}, "'flags': it came twice in this update"),
        ({"name": 5}, "a name is text"),
    ],
)
def test_a_sender_that_lies_about_a_tensor_is_told_which_and_how(change, said):
    """Here the digests are right: the lie itself has to be seen."""
    some = {name: TENSORS[name] for name in ("matrix", "flags")}
    with pytest.raises(TransportError, match=said):
        received(*lie(some, **change), capacity=1 << 12)


def test_what_was_not_announced_is_refused():
    [opening], buckets, closing = sent()
    opening["forms"]["matrix"][0] = [5, 3]
    with pytest.raises(TransportError, match=r"shape \[3, 5\] of float32 came; announced was \[5"):
        received(opening, buckets, closing)
    del opening["forms"]["matrix"]
    with pytest.raises(TransportError, match="'matrix': it was not announced"):
        received(opening, buckets, closing)


def test_what_was_announced_must_come():
    [opening], buckets, closing = sent()
    opening["forms"]["more"] = [[1], "float32"]
    with pytest.raises(TransportError, match="1 of 10 announced tensors never came, 'more'"):
        received(opening, buckets, closing)


def test_both_sides_must_speak_of_the_same_capacity():
    with pytest.raises(TransportError, match="256 bytes, and 128 were agreed"):
        BucketReader(OPENING, 128)


@pytest.mark.parametrize("size", [0, 100])
def test_a_bucket_has_a_size_that_any_type_may_follow(size):
    with pytest.raises(UsageError, match=f"a multiple of 64 bytes, found {size}"):
        BucketWriter(torch.empty(size, dtype=torch.uint8))


# ------------------------------------------------------------------------------ shared memory


def test_both_sides_of_an_arena_see_the_same_bytes():
    mine = Arena.create(1000)
    try:
        assert mine.memory.numel() == 1024
        other = Arena.open(mine.path, mine.memory.numel(), mine.token)
        mine.memory.copy_(torch.arange(1024) % 251)
        assert torch.equal(other.memory, mine.memory)
        assert other.owner_lives()
        mine.unlink()
        assert not Path(mine.path).exists(), "nothing would be left of an owner that is killed now"
        mine.memory.fill_(5)
        assert bool((other.memory == 5).all()), "and both still see the same"
    finally:
        mine.close(remove=True)
    assert not other.owner_lives()
    with pytest.raises(TransportError, match="cannot be opened"):
        Arena.open(mine.path, 1024, mine.token)


def test_an_arena_that_nothing_has_room_for_is_an_error_and_no_crash():
    """Memory that is promised and is not there would end the process at the first write."""
    with pytest.raises(OSError, match=r"space|large|memory"):
        Arena.create(1 << 50)


def test_another_file_of_the_same_name_is_not_taken_for_the_senders():
    """Two containers may have a file of one name each."""
    mine = Arena.create(64)
    try:
        with pytest.raises(TransportError, match="see different files"):
            Arena.open(mine.path, 64, "0" * 64)
        with pytest.raises(TransportError, match="see different files"):
            Arena.open(mine.path, 128, mine.token)
    finally:
        mine.close(remove=True)


def test_an_owner_that_is_killed_is_not_taken_for_alive():
    import os
    import signal
    import subprocess
    import sys

    program = (
        "import sys, time; from weightload.arena import Arena; a = Arena.create(64);"
        "print(a.path, a.token, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as owner:
        path, token = owner.stdout.readline().decode().split()
        arena = Arena.open(path, 64, token)
        try:
            assert arena.owner_lives()
        finally:
            owner.send_signal(signal.SIGKILL)
            owner.wait()
            os.unlink(path)
    assert not arena.owner_lives()
