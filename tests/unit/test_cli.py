"""The command line says what the library finds."""

import struct

import pytest

pytest.importorskip("click")

from click.testing import CliRunner

from weightload.cli import main


def write_file(path, *, cut=0):
    """Write a safetensors file with one tensor of two BF16 elements, less ``cut`` bytes."""
    header = b'{"w":{"dtype":"BF16","shape":[2],"data_offsets":[0,4]}}'
    data = struct.pack("<Q", len(header)) + header + b"\0" * 4
    path.write_bytes(data[: len(data) - cut])


def test_a_whole_checkpoint_is_counted(tmp_path):
    """Files, tensors and elements are counted from the headers."""
    write_file(tmp_path / "model.safetensors")
    result = CliRunner().invoke(main, ["check", str(tmp_path)])
    assert result.exit_code == 0
    assert result.output == "1 files, 1 tensors, 2 x BF16: whole.\n"


@pytest.mark.parametrize("cut", [1, 4, 30, 58])
def test_a_file_that_was_cut_short_is_named(tmp_path, cut):
    """Whatever is missing at the end of a file, the command fails and names the file."""
    write_file(tmp_path / "model.safetensors", cut=cut)
    result = CliRunner().invoke(main, ["check", str(tmp_path)])
    assert result.exit_code == 1
    assert "model.safetensors" in result.output


def test_a_type_is_explained():
    """A type without a hook is PLAIN."""
    result = CliRunner().invoke(main, ["explain", "torch.nn:Linear"])
    assert result.output.startswith("Linear (modules) is PLAIN")


@pytest.mark.parametrize(
    "target", ["torch.nn:Nothing", "nowhere:Class", "torch.nn", "torch.nn:functional"]
)
def test_a_name_that_is_no_class_is_refused(target):
    """The message repeats what was given."""
    result = CliRunner().invoke(main, ["explain", target])
    assert result.exit_code == 2
    assert target in result.output
