"""Files are read straight to where tensors belong, and that comes to the same as a load of tensors.

Damage shown: a place that is filled with other bytes of the file than its own, processed before it is
filled, or left as it was; a file that changes or ends while it is read, and a model that is served
nevertheless.
"""

import errno
import json
import os
import random
import struct
import subprocess
import sys
import time

import pytest
import torch
from files_of import write, write_folder

from weightload import (
    Checkpoint,
    CheckpointFileError,
    DuplicateWeightError,
    IncompleteLoadError,
    Scope,
    SessionState,
    UnexpectedWeightError,
    UsageError,
    WeightLoadSession,
    WeightMismatchError,
    bundle,
    filling,
    mapped,
    reading,
    reporting,
)
from weightload.testing import TOYS, Bench, LoadingModel, ToyModel, layers, loading

COMMITS = ("stream", "atomic")
COLLECTING = {"collecting", "collecting, composed"}


def shuffled(state, seed):
    names = list(state)
    random.Random(seed).shuffle(names)
    return {name: state[name] for name in names}


def _name(file, offset):
    return max(
        (header.offset, name) for name, header in file.headers.items() if header.offset <= offset
    )[1]


@pytest.fixture
def places(monkeypatch):
    """The names that were read, each with the address that the bytes went to and how many."""
    found = []

    def noted(handle, file, pieces):
        pieces = list(pieces)
        found.extend((_name(file, offset), address, nbytes) for offset, nbytes, address in pieces)
        reading.read_pieces(handle, file, pieces)

    monkeypatch.setattr(filling, "read_pieces", noted)
    return found


@pytest.mark.parametrize("maps", [False, True])
@pytest.mark.parametrize("plans", [True, False])
@pytest.mark.parametrize("commit", COMMITS)
@pytest.mark.parametrize("toy", TOYS)
def test_loads_from_files_equal_fresh_loads(toy, commit, plans, maps, tmp_path, monkeypatch):
    if maps:  # where the system has what that takes
        monkeypatch.setattr(reading, "_WORTH_MAPPING", 0)
    bench = Bench(TOYS[toy])
    for seed in (2, 3, 4):
        folder = write_folder(tmp_path / str(seed), shuffled(bench.state(seed), seed))
        with bench.session(plans=plans, commit=commit) as session:
            session.load(Checkpoint(folder))
        bench.serves = bench.state(seed)
        bench.check_finished(session)
        names = len(bench.state(seed))
        assert session.receipt.consumed.count + session.receipt.skipped.count == names
        assert session.receipt.bytes_received == Checkpoint(folder).nbytes


class Elsewhere:
    """A path as other libraries have it."""

    def __init__(self, path):
        self.path = path

    def __fspath__(self):
        return str(self.path)


def test_a_checkpoint_is_given_as_a_path_of_any_kind(tmp_path):
    folder = write_folder(tmp_path / "c", {"a": torch.ones(2), "b": torch.ones(3)})
    files = sorted(folder.iterdir())
    for source in (str(folder), Elsewhere(folder), [*map(Elsewhere, files)], iter(files)):
        assert [*Checkpoint(source)] == ["a", "b"]
    assert [*Checkpoint(Elsewhere(files[0]))] == ["a"]


@pytest.mark.parametrize("source", [None, 5, b"folder", [5], [None]], ids=repr)
def test_what_is_no_path_is_called_so(source):
    with pytest.raises(UsageError, match="is given as a path"):
        Checkpoint(source)


def test_a_path_that_the_system_does_not_take_is_named(tmp_path):
    for name in ("x" * 300, "x" * 300 + ".safetensors", "file/inner", "nul\0"):
        write(tmp_path / "file", {"a": torch.ones(2)})
        with pytest.raises(CheckpointFileError):
            Checkpoint(tmp_path / name)
    with pytest.raises(CheckpointFileError, match="is a file"):
        Checkpoint(tmp_path / "file")


@pytest.mark.parametrize("number", [errno.EACCES, errno.EMFILE])
def test_a_folder_that_cannot_be_looked_at_is_not_called_empty(number, tmp_path, monkeypatch):
    def refused(*args, **options):
        raise OSError(number, os.strerror(number))

    write(tmp_path / "model.safetensors", {"a": torch.ones(2)})
    for name in ("listdir", "scandir"):
        monkeypatch.setattr(os, name, refused)
    with pytest.raises(CheckpointFileError, match=f"looked at.*{os.strerror(number)}"):
        Checkpoint(tmp_path)
    monkeypatch.undo()
    monkeypatch.setattr(os, "stat", refused)
    with pytest.raises(CheckpointFileError, match=os.strerror(number)):
        Checkpoint(tmp_path)


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "model.safetensors")
    code = "import sys, weightload; weightload.Checkpoint(sys.argv[1])"
    ran = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], timeout=60, capture_output=True, text=True
    )
    assert "it is no regular file" in ran.stderr


def test_headers_and_indexes_that_are_nested_too_deeply_are_refused(tmp_path):
    nested = b"[" * 100_000
    file = tmp_path / "model.safetensors"
    file.write_bytes(struct.pack("<Q", len(nested)) + nested)
    with pytest.raises(CheckpointFileError, match="header"):
        Checkpoint(file)
    (tmp_path / "model.safetensors.index.json").write_bytes(nested)
    with pytest.raises(CheckpointFileError, match="index"):
        Checkpoint(tmp_path)


def test_a_first_load_may_come_from_files(tmp_path):
    bench = Bench(TOYS["plain"])
    model = TOYS["plain"]()
    with WeightLoadSession(model) as session:
        session.load(Checkpoint(write_folder(tmp_path / "c", bench.state(1))))
    assert torch.equal(model.layers[1].weight, bench.state(1)["layers.1.weight"])


def test_a_known_tensor_is_read_to_its_live_place_and_nowhere_else(tmp_path, places):
    bench = Bench(lambda: LoadingModel(loading.FusedLinear(), layers.Linear()))
    bench.reload(bench.state(2), plans=True)
    places.clear()
    folder = write_folder(tmp_path / "c", bench.state(3))
    with bench.session(plans=True) as session:
        session.load(Checkpoint(folder))
    bench.serves = bench.state(3)
    bench.check_finished(session)
    live = dict(bench.model.named_parameters())
    expected = []
    for name in bench.state(3):
        whole, _, part = name.partition("/")
        size = live[whole].nbytes // (3 if part else 1)  # three shards, one after another
        expected.append((name, live[whole].data_ptr() + int(part or 0) * size, size))
    assert sorted(places) == sorted(expected)
    assert len(expected) == 7


def test_only_the_rows_that_this_rank_takes_are_read(tmp_path, places):
    """Rows 2 to 4 of 4, that is the second half of 32 bytes."""

    class Half(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(2, 2), requires_grad=False)
            self.weight.weight_loader = lambda place, t: place.data.copy_(t.narrow(0, 2, 2))

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Half()

        def load_weights(self, weights):
            for _, tensor in weights:
                self.inner.weight.weight_loader(self.inner.weight, tensor)

    model = Model()
    sent = torch.arange(8.0).view(4, 2)
    for plus in (0, 10, 20):
        places.clear()
        file = write(tmp_path / f"{plus}.safetensors", {"inner.weight": sent + plus})
        with WeightLoadSession(model, plans=True) as session:
            session.load(Checkpoint(file))
        assert model.inner.weight.tolist() == [[4 + plus, 5 + plus], [6 + plus, 7 + plus]]
    assert places == [("inner.weight", model.inner.weight.data_ptr(), 16)]


def test_what_is_not_needed_is_not_read(tmp_path, places):
    """A plan that knows that nothing takes a name; and a name that the scope lets drop."""

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(2), requires_grad=False)

        def load_weights(self, weights):
            for name, tensor in weights:
                if name == "weight":
                    self.weight.data.copy_(tensor)

    model = Model()
    state = {"of another rank": torch.ones(3), "weight": torch.tensor([1.0, 2.0])}
    file = write(tmp_path / "one.safetensors", state)
    for _ in range(2):
        places.clear()
        with WeightLoadSession(model, plans=True) as session:
            session.load(Checkpoint(file))
    assert [name for name, _, _ in places] == ["weight"]
    file = write(tmp_path / "two.safetensors", {**state, "vision.weight": torch.ones(3)})
    places.clear()
    scope = Scope.full(allow_unexpected=("vision.*",))
    with WeightLoadSession(model, plans=True, scope=scope) as session:
        session.load(Checkpoint(file))
    assert [name for name, _, _ in places] == ["weight"]
    assert session.receipt.unexpected.first == ["vision.weight"]
    assert session.receipt.skipped.first == ["of another rank"]


@pytest.mark.skipif(not hasattr(torch, "float4_e2m1fn_x2"), reason="torch has no such type")
@pytest.mark.parametrize("plans", [True, False])
def test_elements_that_share_a_byte_are_loaded_again_and_again(plans, tmp_path, places):
    """The file counts the elements, and torch the bytes."""

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            room = torch.zeros(2, 4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
            self.weight = torch.nn.Parameter(room, requires_grad=False)

        def load_weights(self, weights):
            for _, tensor in weights:
                self.weight.data.copy_(tensor)

    model = Model()
    head = json.dumps({"weight": {"dtype": "F4", "shape": [2, 8], "data_offsets": [0, 8]}}).encode()
    for start in range(3):
        places.clear()
        file, data = tmp_path / f"{start}.safetensors", bytes(range(start, start + 8))
        file.write_bytes(struct.pack("<Q", len(head)) + head + data)
        with WeightLoadSession(model, plans=plans) as session:
            session.check(Checkpoint(file).forms, complete=True)
            session.load(Checkpoint(file))
        assert model.weight.view(torch.uint8).view(-1).tolist() == list(data)
    assert not plans or places == [("weight", model.weight.data_ptr(), 8)]


def test_other_types_are_cast_the_long_way(tmp_path):
    bench = Bench(TOYS["fused"])
    bench.reload(bench.state(2), plans=True)
    half = {name: tensor.half() for name, tensor in bench.state(3).items()}
    with bench.session(plans=True) as session:
        session.load(Checkpoint(write_folder(tmp_path / "c", half)))
    bench.serves = {name: tensor.float() for name, tensor in half.items()}
    bench.check_finished(session)


@pytest.mark.parametrize("options", [{"verify": "full"}, {"check_finite": True}])
def test_files_are_compared_and_checked_as_tensors_are(options, tmp_path):
    bench = Bench(TOYS["everything"])
    for seed in (2, 3):
        folder = write_folder(tmp_path / str(seed), bench.state(seed))
        with bench.session(plans=True, **options) as session:
            session.load(Checkpoint(folder))
        bench.serves = bench.state(seed)
        bench.check_finished(session)
    if "verify" in options:
        assert session.receipt.verified["tensors"] > 0
        same = bench.reload(bench.state(3), plans=True, **options)
        assert same.receipt.verified == session.receipt.verified
        return
    new = bench.state(4)
    new["embedding.weight"][1, 1] = float("nan")
    with pytest.raises(WeightMismatchError, match="nan"), bench.session(**options) as session:
        session.load(Checkpoint(write_folder(tmp_path / "nan", new)))
    bench.check_ended(session)


@pytest.mark.parametrize("commit", COMMITS)
@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ("missing", IncompleteLoadError),
        ("twice", DuplicateWeightError),
        ("unknown", (UnexpectedWeightError, WeightMismatchError)),
        ("shape", WeightMismatchError),
        ("dtype", WeightMismatchError),
    ],
)
def test_what_is_wrong_is_found_and_mostly_before_any_write(fault, error, commit, tmp_path):
    bench = Bench(TOYS["fused"])
    bench.reload(bench.state(2), plans=True)
    new = bench.state(3)
    name = list(new)[-1]
    whole = write_folder(tmp_path / "whole", new)
    if fault == "missing":
        del new[name]
    elif fault == "unknown":
        new[f"{name}.nowhere"] = new[name]
    elif fault == "shape":
        new[name] = new[name][:1]
    elif fault == "dtype":
        new[name] = new[name].to(torch.int32)
    folder = write_folder(tmp_path / "c", new)
    session = bench.open(plans=True, commit=commit)
    if fault == "twice":
        session.load(Checkpoint(whole))
    with pytest.raises(error):  # noqa: PT012
        session.load(Checkpoint(folder))
        session.finish()
    bench.check_ended(session)
    if fault in ("unknown", "shape", "dtype"):
        assert session.state is SessionState.ABORTED
    bench.reload(bench.state(4), plans=True)


def whole_and_cut(tmp_path, bench, seed):
    """Return a checkpoint in two files, and the second of them."""
    folder = write_folder(tmp_path / "c", bench.state(seed))
    return Checkpoint(folder), sorted(folder.iterdir())[1]


@pytest.mark.parametrize("commit", COMMITS)
@pytest.mark.parametrize("how", ["cut", "gone", "replaced", "written"])
def test_a_file_that_is_another_one_by_now_is_refused(how, commit, tmp_path):
    bench = Bench(TOYS["fused"])
    bench.reload(bench.state(2), plans=True)
    checkpoint, file = whole_and_cut(tmp_path, bench, 3)
    content = file.read_bytes()
    if how == "cut":
        os.truncate(file, len(content) - 4)
    elif how == "gone":
        file.unlink()
    elif how == "replaced":
        (tmp_path / "new").write_bytes(content)
        (tmp_path / "new").replace(file)
    else:
        file.write_bytes(content)
        os.utime(file, ns=(1, 1))
    session = bench.open(plans=True, commit=commit)
    with pytest.raises(CheckpointFileError, match=file.name) as caught:
        session.load(checkpoint)
    bench.check_ended(session, caught.value)
    poisoned = commit == "stream"  # the first of the files was written by then
    assert (session.state is SessionState.POISONED) == poisoned
    bench.reload(bench.state(4), plans=True)


@pytest.mark.parametrize("plans", [True, False])
@pytest.mark.parametrize("how", ["ends", "fails"])
def test_a_read_that_fails_names_the_file_and_the_tensor_and_poisons(
    how, plans, tmp_path, monkeypatch
):
    bench = Bench(TOYS["plain"])
    bench.reload(bench.state(2), plans=plans)
    checkpoint = Checkpoint(write_folder(tmp_path / "c", bench.state(3), files=1))
    last = list(bench.state(3))[-1]
    real, calls = os.preadv, []

    def failing(handle, buffers, at):
        """Give 8 bytes of what is asked for, and the last tensor never."""
        calls.append(at)
        if len(buffers) > 1 or at < checkpoint._headers[last].offset:
            return real(handle, [memoryview(buffers[0]).cast("B")[:8]], at)
        if how == "ends":
            return 0
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", failing)
    session = bench.open(plans=plans)
    with pytest.raises(CheckpointFileError) as caught:
        session.load(checkpoint)
    monkeypatch.undo()
    assert len(calls) > 4
    assert last in str(caught.value)
    assert "model-00001-of-00001.safetensors" in str(caught.value)
    assert session.state is SessionState.POISONED
    bench.check_ended(session, caught.value)
    bench.reload(bench.state(4))


def test_a_file_that_is_cut_short_while_it_is_mapped_ends_no_process(tmp_path, monkeypatch):
    """The writer waits, is noticed before the next look at the file, and goes on then."""
    monkeypatch.setattr(reading, "_WORTH_MAPPING", 0)
    monkeypatch.setattr(bundle, "_AT_ONCE", 1)
    monkeypatch.setattr(reporting, "EVERY", 0.0)
    bench = Bench(lambda: ToyModel(*(layers.Linear() for _ in range(20))))
    for seed in (2, 3):
        bench.reload(bench.state(seed), plans=True)
    file = write(tmp_path / "model.safetensors", bench.state(4))
    code = "import sys; f = open(sys.argv[1], 'r+b'); f.truncate(100); f.flush()"
    cutters, looks, holds = [], [], mapped.Mapped.holds

    def looked(self, begin, end):
        looks.append(holds(self, begin, end))
        return looks[-1]

    def cut(progress):
        if not cutters and (progress.tensors == 5 or not looks):
            cutters.append(subprocess.Popen([sys.executable, "-c", code, str(file)]))
            time.sleep(1)

    monkeypatch.setattr(mapped.Mapped, "holds", looked)
    session = bench.open(plans=True)
    try:
        session.load(Checkpoint(file), progress=cut)
    except CheckpointFileError as error:  # it was cut before the rest of it was read
        assert session.state is SessionState.POISONED
        bench.check_ended(session, error)
    else:
        session.finish()
        bench.serves = bench.state(4)
        bench.check_finished(session)
    assert looks in ([], [True] * 5 + [False])
    assert cutters[0].wait(20) == 0
    bench.reload(bench.state(5), plans=True)


def test_more_neighbours_than_one_call_can_fill_and_short_reads(tmp_path, monkeypatch):
    real, most = os.preadv, []

    def short(handle, buffers, at):
        """Give 1000 bytes at most."""
        most.append(len(buffers))
        taken, left = [], 1000
        for buffer in buffers:
            view = memoryview(buffer).cast("B")[:left]
            taken.append(view)
            left -= len(view)
            if not left:
                break
        return real(handle, taken, at)

    monkeypatch.setattr(os, "preadv", short)
    monkeypatch.setattr(reading, "_MOST", 7)
    bench = Bench(lambda: ToyModel(*(layers.Linear() for _ in range(20))))
    for seed in (2, 3, 4):
        folder = write_folder(tmp_path / str(seed), bench.state(seed), files=1)
        with bench.session(plans=True) as session:
            session.load(Checkpoint(folder))
        bench.serves = bench.state(seed)
        bench.check_finished(session)
    assert max(most) == 7


def test_memory_that_was_lent_to_loaders_is_used_again(tmp_path, places):
    """Without a plan everything goes through the same memory, which nobody may keep."""
    bench = Bench(TOYS["collecting"])
    for seed in (2, 3):
        folder = write_folder(tmp_path / str(seed), bench.state(seed), files=1)
        with bench.session() as session:
            session.load(Checkpoint(folder))
        bench.serves = bench.state(seed)
        bench.check_finished(session)
    second = [address for _, address, _ in places[len(bench.state(2)) :]]
    assert len(set(second)) == 1
