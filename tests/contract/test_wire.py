"""What came over a wire is what was sent, or it is refused before any of it is loaded.

A bucket whose bytes or record changed on the way, came again, was left out, came in another order, or
tells lies about shapes, types or counts: each would put wrong values into a model, silently. The
yardstick is what was packed, compared bit for bit.
"""

import copy
import json

import pytest
import torch
from files_of import write
from hypothesis import assume, given
from hypothesis import strategies as st

from weightload import Checkpoint, TransportError, UsageError, WeightMismatchError, wire
from weightload.arena import Arena
from weightload.digest import digest
from weightload.packing import BucketWriter, forms_of
from weightload.sending import Sent, is_folder, operations
from weightload.unpacking import BucketReader

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


def sealed(record, octets):
    """Return the digest that goes with a record, whatever it says."""
    body = {key: value for key, value in record.items() if key != "digest"}
    return wire.mark(body, octets[: record["nbytes"]])


def lie(tensors, capacity=1 << 12, **changes):
    """Pack tensors as a sender that tells lies about the first one and seals them properly."""
    [opening], [(record, octets)], closing = sent(tensors, announced=False, capacity=capacity)
    fields = ("name", "dtype", "shape", "offset", "begin", "length")
    true = zip(fields, record["rows"][0], strict=True)
    record["rows"][0] = [changes.get(field, value) for field, value in true]
    record["digest"] = sealed(record, octets)
    closing["digest"] = wire.chained("", record["digest"])
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


@pytest.mark.parametrize(
    "shape", [[2**50], [2**61], [2**70], [0, 2**70], [0, 2**62, 2**62], [2**40, 2**40]]
)
@pytest.mark.parametrize("announced", [True, False])
def test_a_size_that_nothing_has_room_for_is_refused_by_name_and_the_bucket_may_be_sent_again(
    shape, announced
):
    """Whether it was announced or not, of no elements or of too many: no allocator's own error."""
    some = {"matrix": torch.arange(32.0).view(4, 8)}  # two full lines: may be part of a larger one
    nothing = 0 in shape
    lied = lie(some, shape=shape, **({"length": 0} if nothing else {}))
    [opening], [(record, octets)], closing = sent(some, announced=False, capacity=1 << 12)
    lied[1][0][0]["update"] = opening["update"]
    lied[1][0][0]["digest"] = sealed(lied[1][0][0], octets)
    if announced:
        opening["forms"] = {"matrix": [shape, "float32"]}
        with pytest.raises(TransportError, match="'matrix'"):
            received(opening, lied[1], closing, capacity=1 << 12)
        return
    reader = BucketReader(opening, 1 << 12)
    with pytest.raises(TransportError, match="Bucket 0, 'matrix'"):
        reader.take(*lied[1][0])
    [(name, tensor)] = reader.take(record, octets)
    assert name == "matrix"
    assert torch.equal(tensor, some["matrix"])
    reader.close(closing)


class Wrapper(torch.Tensor):
    """Keeps its values in another tensor, as a DTensor does."""

    @staticmethod
    def __new__(cls, inner):
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return cls(args[0].inner)
        raise NotImplementedError(func)


class Flattened(Wrapper):
    """Says which tensors these are."""

    def __tensor_flatten__(self):
        return ["inner"], None


STRANGE = {
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.quint8),
    "sparse": lambda: torch.eye(2).to_sparse(),
    "rows": lambda: torch.eye(2).to_sparse_csr(),
    "without bytes": lambda: torch.ones(2, device="meta"),
    "a wrapper": lambda: Wrapper(torch.ones(2)),
    "that tells": lambda: Flattened(torch.ones(2)),
    "text": lambda: "x",
    "a list": lambda: [1.0],
    "none": lambda: None,
}


@pytest.mark.parametrize("name", STRANGE)
def test_what_has_no_bytes_to_send_is_refused_by_name(name):
    one = STRANGE[name]()
    memory = torch.zeros(CAPACITY, dtype=torch.uint8)
    with pytest.raises(UsageError, match=f"'{name}'"):
        list(BucketWriter(memory).fill([(name, one)]))
    if name not in ("without bytes", "sparse", "rows", "a wrapper", "that tells"):
        with pytest.raises(UsageError, match=f"'{name}'"):
            forms_of({name: one})
    with pytest.raises(UsageError, match="name"):
        list(BucketWriter(memory).fill([(5, torch.ones(1))]))


@pytest.mark.parametrize("check_finite", [False, True])
@pytest.mark.parametrize("name", STRANGE)
def test_a_mapping_is_looked_at_before_anything_is_sent(name, check_finite):
    weights = {"first": torch.ones(2), name: STRANGE[name]()}
    with pytest.raises(UsageError, match=f"'{name}'"):
        next(operations(weights, check_finite=check_finite))
    with pytest.raises(UsageError, match=f"'{name}'"):
        Sent(print, weights)


@pytest.mark.parametrize("pair", [torch.ones(3), ("a", torch.ones(1), 2), 5, "abc"])
def test_what_is_no_pair_is_called_so(pair):
    memory = torch.zeros(CAPACITY, dtype=torch.uint8)
    with pytest.raises(WeightMismatchError, match=r"yields \(name, tensor\) pairs"):
        list(BucketWriter(memory).fill([pair]))
    with pytest.raises(WeightMismatchError, match=r"yields \(name, tensor\) pairs"):
        list(operations([pair]))


def test_a_folder_is_named_whatever_kind_of_path_it_is_given_as(tmp_path):
    class Elsewhere:
        def __fspath__(self):
            return str(tmp_path)

    for folder in (str(tmp_path), tmp_path, Elsewhere()):
        assert is_folder(folder)
        assert list(operations(folder)) == [("load_path", {"path": str(tmp_path)})]


def test_the_size_of_a_checkpoint_is_told_without_a_look_at_its_tensors(tmp_path, monkeypatch):
    checkpoint = Checkpoint(write(tmp_path / "one.safetensors", {"a": torch.ones(3)}))
    monkeypatch.setattr(Checkpoint, "__getitem__", None)
    reports = []
    Sent(reports.append, checkpoint).close()
    assert [(one.tensors_total, one.nbytes_total) for one in reports] == [(1, 12)]


@pytest.mark.parametrize("count", [0, -1, 3, 128])
def test_memory_that_has_no_such_parts_is_not_divided(count):
    arena = Arena.create(256)
    try:
        with pytest.raises(TransportError, match=f"has no {count} equal parts"):
            arena.parts(count)
        assert len(arena.parts(2)) == 2
    finally:
        arena.close(remove=True)


@pytest.mark.parametrize(
    ("one", "value"),
    [
        (torch.tensor([1 + 2j]).conj(), torch.tensor([1 - 2j])),
        (torch._neg_view(torch.ones(3)), -torch.ones(3)),
        (torch.tensor([1 + 2j]).conj().imag, torch.tensor([-2.0])),
        (torch.arange(4.0)[1::2][:1], torch.tensor([1.0])),
    ],
)
def test_what_a_view_only_promises_to_do_is_done_when_it_is_sent(one, value):
    """Conjugates and negatives are flags on other bytes; one element may have any stride."""
    opening, buckets, closing = sent({"one": one})
    assert torch.equal(received(*opening, buckets, closing)["one"], value)


def test_the_digest_of_one_element_is_that_of_its_bytes_whatever_its_stride():
    assert digest(torch.arange(4.0)[1::2][:1]) == digest(torch.tensor([1.0]))


@pytest.mark.parametrize(
    "dtype", ["quint8", "qint8", "quint4x2", "bits8", "bits16", "int1", "int4"]
)
def test_a_type_without_plain_bytes_is_not_believed(dtype):
    """torch has a dtype of this name, and what it holds could not be compared, or ends a process."""
    assert isinstance(getattr(torch, dtype), torch.dtype)
    some = {"bytes": TENSORS["bytes"]}
    with pytest.raises(TransportError, match=f"Bucket 0, 'bytes': '{dtype}' is no dtype"):
        received(*lie(some, dtype=dtype), capacity=1 << 12)
    [opening], _, _ = sent(some)
    opening["forms"]["bytes"][1] = dtype
    with pytest.raises(TransportError, match="'bytes'"):
        BucketReader(opening, CAPACITY)


@pytest.mark.parametrize(
    "memory",
    [
        torch.zeros(64),
        torch.zeros(8, 8, dtype=torch.uint8),
        torch.zeros(128, dtype=torch.uint8)[::2],
        torch.zeros(65, dtype=torch.uint8)[1:],
        bytearray(64),
        None,
    ],
    ids=["float32", "two dimensions", "every second byte", "from byte 1 on", "no tensor", "none"],
)
def test_memory_that_is_no_run_of_bytes_is_refused_on_both_sides(memory):
    with pytest.raises(UsageError, match="memory"):
        BucketWriter(memory)
    opening, [(record, _)], _ = sent({"flags": TENSORS["flags"]}, capacity=64)
    with pytest.raises(UsageError, match="memory"):
        BucketReader(*opening, 64).take(record, memory)


def test_nothing_is_taken_after_the_closing():
    """It would be loaded, and no closing would have counted it."""
    memory = torch.zeros(CAPACITY, dtype=torch.uint8)
    writer = BucketWriter(memory)
    reader = BucketReader(writer.opening(), CAPACITY)
    for record in writer.fill([("twin 1", TENSORS["twin 1"])]):
        reader.take(record, memory)
    closing = writer.closing()
    reader.close(closing)
    for record in writer.fill([("twin 2", TENSORS["twin 2"])]):
        with pytest.raises(TransportError, match="Bucket 1 came after the closing"):
            reader.take(record, memory)
        with pytest.raises(TransportError, match="Bucket 1 came after the closing"):
            reader.check(record)
    with pytest.raises(TransportError, match="closed already"):
        reader.close(closing)


def test_buckets_go_to_several_memories_in_turn():
    memories = [torch.zeros(64, dtype=torch.uint8) for _ in range(2)]
    writer = BucketWriter(memories[0], spare=memories[1:])
    reader = BucketReader(writer.opening(), 64)
    sent = {f"{number}": torch.full((16,), float(number)) for number in range(5)}
    records, got = [], {}
    for record in writer.fill(sent.items()):
        records.append(record)
        if len(records) > 1:  # the one before is still there
            got.update(_copied(reader, records[-2], memories))
    got.update(_copied(reader, records[-1], memories))
    reader.close(writer.closing())
    assert [record["index"] for record in records] == list(range(5))
    assert got.keys() == sent.keys()
    assert all(torch.equal(got[name], sent[name]) for name in sent)
    with pytest.raises(UsageError, match=r"one size, found \[64, 128\]"):
        BucketWriter(memories[0], spare=[torch.zeros(128, dtype=torch.uint8)])


def _copied(reader, record, memories):
    found = reader.take(record, memories[record["index"] % 2])
    return {name: tensor.clone() for name, tensor in found}
