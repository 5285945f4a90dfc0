"""What a checkpoint says about its files, and single tensors of them.

Damage shown: a header that promises what the file does not hold is believed, and other bytes than a
tensor's own are taken for it.
"""

import json
import struct

import pytest
import torch

from weightload import Checkpoint, CheckpointFileError, DuplicateWeightError, UnsupportedError
from weightload.bounce import Bounce
from weightload.reading import opened

safetensors = pytest.importorskip("safetensors")
safetensors_torch = pytest.importorskip("safetensors.torch")

STATE = {
    "scalar": torch.tensor(2.5),
    "empty": torch.empty(0, 3),
    "bool": torch.tensor([True, False, True]),
    "half": torch.linspace(-2, 2, 5).half(),
    "brain": torch.linspace(-2, 2, 6).bfloat16().view(2, 3),
    "long": torch.arange(-3, 4),
    "double": torch.linspace(0, 1, 3, dtype=torch.float64),
    "complex": torch.tensor([1 + 2j, 3 - 4j]),
    "eight": torch.linspace(-2, 2, 5).to(torch.float8_e4m3fn),
    "byte": torch.arange(7, dtype=torch.uint8),
}


RARE = {  # what this torch has of them
    kind: getattr(torch, name)
    for kind, name in (
        ("F8_E8M0", "float8_e8m0fnu"),
        ("F8_E4M3FNUZ", "float8_e4m3fnuz"),
        ("F8_E5M2FNUZ", "float8_e5m2fnuz"),
        ("F4", "float4_e2m1fn_x2"),
    )
    if hasattr(torch, name)
}


def handmade(path, table, data=b""):
    head = json.dumps(table).encode()
    path.write_bytes(struct.pack("<Q", len(head)) + head + data)
    return path


def test_every_tensor_is_what_the_safetensors_library_wrote(tmp_path):
    file = tmp_path / "one.safetensors"
    safetensors_torch.save_file(STATE, file)
    checkpoint = Checkpoint(file)
    assert checkpoint.keys() == STATE.keys()
    assert len(checkpoint) == len(STATE)
    assert checkpoint.nbytes == sum(tensor.nbytes for tensor in STATE.values())
    for name, tensor in STATE.items():
        found = checkpoint[name]
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
        assert (
            found.view(-1).view(torch.uint8).tolist() == tensor.view(-1).view(torch.uint8).tolist()
        )
        assert checkpoint.forms[name] == (tensor.shape, tensor.dtype)
    assert "nowhere" not in checkpoint
    with pytest.raises(KeyError):
        checkpoint["nowhere"]


def test_a_type_that_torch_has_no_name_for_is_read_by_the_library(tmp_path, monkeypatch):
    from weightload import reading

    file = tmp_path / "one.safetensors"
    safetensors_torch.save_file({"weight": torch.tensor([1.0, 2.0])}, file)
    monkeypatch.setattr(reading, "_DTYPES", {})
    assert Checkpoint(file)["weight"].tolist() == [1.0, 2.0]
    assert Checkpoint(file).forms["weight"] == (2,)


@pytest.mark.parametrize("kind", RARE)
def test_rare_types_are_what_the_safetensors_library_makes_of_them(kind, tmp_path):
    """Elements of four bits share a byte; the file counts them apart, and torch together."""
    sizes = [2, 4] if kind == "F4" else [2, 2]
    table = {"weight": {"dtype": kind, "shape": sizes, "data_offsets": [0, 4]}}
    file = handmade(tmp_path / "one.safetensors", table, bytes([1, 2, 3, 4]))
    with safetensors.safe_open(file, framework="pt") as library:
        theirs = library.get_tensor("weight")
    ours = Checkpoint(file)["weight"]
    assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape) == (RARE[kind], (2, 2))
    assert ours.view(torch.uint8).tolist() == theirs.view(torch.uint8).tolist() == [[1, 2], [3, 4]]
    assert Checkpoint(file).forms["weight"] == ((2, 2), RARE[kind])


def test_a_type_that_nobody_knows_is_named(tmp_path):
    table = {"weight": {"dtype": "F3_E1M1", "shape": [8], "data_offsets": [0, 3]}}
    file = handmade(tmp_path / "one.safetensors", table, bytes(3))
    with pytest.raises(UnsupportedError, match=r"'weight' in .* is of type F3_E1M1"):
        Checkpoint(file)["weight"]


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_what_the_library_reads_is_of_the_file_whose_header_was_read(when, tmp_path, monkeypatch):
    from weightload import reading

    file, new = tmp_path / "one.safetensors", tmp_path / "new"
    for path, value in ((file, 1.0), (new, 2.0)):
        safetensors_torch.save_file({"weight": torch.tensor([value])}, path)
    monkeypatch.setattr(reading, "_DTYPES", {})
    checkpoint, real = Checkpoint(file), safetensors.safe_open

    def replaced(*args, **options):
        new.replace(file)
        return real(*args, **options)

    if when == "before":
        new.replace(file)
    else:
        monkeypatch.setattr(safetensors, "safe_open", replaced)
    with pytest.raises(CheckpointFileError, match="changed since its header was read"):
        checkpoint["weight"]


def test_an_index_says_which_files_of_a_folder_count(tmp_path):
    for name, value in (("a", 1.0), ("b", 2.0), ("consolidated", 3.0)):
        tensors = {"weight" if name != "b" else "bias": torch.tensor([value])}
        safetensors_torch.save_file(tensors, tmp_path / f"{name}.safetensors")
    with pytest.raises(DuplicateWeightError, match="consolidated"):
        Checkpoint(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(
        json.dumps({"weight_map": {"weight": "a.safetensors", "bias": "b.safetensors"}})
    )
    assert {name: float(tensor) for name, tensor in Checkpoint(tmp_path).items()} == {
        "weight": 1.0,
        "bias": 2.0,
    }
    index.write_text("{}")
    with pytest.raises(CheckpointFileError, match="index"):
        Checkpoint(tmp_path)
    index.write_text(json.dumps({"weight_map": {"weight": "lost.safetensors"}}))
    with pytest.raises(CheckpointFileError, match="lost"):
        Checkpoint(tmp_path)


def test_several_files_make_one_checkpoint(tmp_path):
    files = [tmp_path / "b.safetensors", tmp_path / "a.safetensors"]
    for value, file in enumerate(files):
        safetensors_torch.save_file({file.stem: torch.tensor([float(value)])}, file)
    assert [float(tensor) for tensor in Checkpoint(files).values()] == [0.0, 1.0]
    (tmp_path / "none").mkdir()
    with pytest.raises(CheckpointFileError):
        Checkpoint(tmp_path / "none")


@pytest.mark.parametrize(
    ("entry", "what"),
    [
        ({"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}, "takes 8"),
        ({"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}, "lies at bytes 4 to 0"),
        ({"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}, "lies at bytes -4 to 0"),
        ({"dtype": "F32", "shape": [-1, -1], "data_offsets": [0, 4]}, "takes 4"),
        ({"dtype": "F32", "shape": [1.0], "data_offsets": [0, 4]}, "no safetensors header"),
        ({"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}, "promises"),
        ({"dtype": "F4", "shape": [2, 3], "data_offsets": [0, 3]}, "no whole bytes"),
        ({"dtype": "F4", "shape": [], "data_offsets": [0, 1]}, "no whole bytes"),
        ({"dtype": "F4", "shape": [2, 4], "data_offsets": [0, 8]}, "takes 4"),
    ],
)
def test_a_header_that_cannot_be_true_is_refused(entry, what, tmp_path):
    file = handmade(tmp_path / "one.safetensors", {"weight": entry}, b"\0" * 8)
    with pytest.raises(CheckpointFileError, match=what):
        Checkpoint(file)


def test_a_look_up_in_a_file_that_was_changed_is_refused(tmp_path):
    file = tmp_path / "one.safetensors"
    safetensors_torch.save_file({"weight": torch.tensor([1.0])}, file)
    checkpoint = Checkpoint(file)
    file.write_bytes(file.read_bytes() + b"more")
    with pytest.raises(CheckpointFileError, match="changed since its header was read"):
        checkpoint["weight"]


def test_tensors_of_files_are_on_the_host_whatever_the_default_device_is(tmp_path):
    file = tmp_path / "one.safetensors"
    safetensors_torch.save_file({"weight": torch.tensor([1.0, 2.0])}, file)
    with torch.device("meta"):
        assert Checkpoint(file)["weight"].tolist() == [1.0, 2.0]


class Stream:
    """Stands for the events of a device that has done a copy when it is waited for."""

    waited = 0

    class Event:
        def record(self):
            pass

        def synchronize(self):
            Stream.waited += 1


@pytest.mark.parametrize("nbytes", [1, 3, 8, 64])
def test_pieces_reach_their_places_through_two_small_buffers(nbytes, tmp_path, monkeypatch):
    """What a device needs, on the host: each buffer is waited for before it is filled again."""
    data = bytes(range(50))
    table = {"a": {"dtype": "U8", "shape": [50], "data_offsets": [0, 50]}}
    checkpoint = Checkpoint(handmade(tmp_path / "one.safetensors", table, data))
    [file] = checkpoint.contents
    first = file.headers["a"].offset
    places = [torch.zeros(5, 2, dtype=torch.int8), torch.zeros(10, dtype=torch.int16)]
    pieces = [(first + 3, places[0]), (first + 20, places[1])]
    Stream.waited = 0
    real = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, pin_memory=False, **kw: real(*args, **kw))
    with opened(file) as handle:
        Bounce(nbytes, lambda: Stream).fill(handle, file, pieces)
    assert places[0].view(-1).tolist() == list(range(3, 13))
    assert places[1].view(torch.uint8).tolist() == list(range(20, 40))
    assert Stream.waited == max(-(-30 // nbytes) - 2, 0)
