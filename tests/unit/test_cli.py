"""The command line says what the library finds."""

import json
import struct
import sys

import pytest

pytest.importorskip("click")

from click.testing import CliRunner

from weightload.cli import main


def write_file(path, *, name="w", cut=0):
    """Write a safetensors file with one tensor of two BF16 elements, less ``cut`` bytes."""
    header = b'{"%s":{"dtype":"BF16","shape":[2],"data_offsets":[0,4]}}' % name.encode()
    data = struct.pack("<Q", len(header)) + header + b"\0" * 4
    path.write_bytes(data[: len(data) - cut])


def test_a_whole_checkpoint_is_counted(tmp_path):
    """Files, tensors and elements are counted from the headers."""
    write_file(tmp_path / "model.safetensors")
    result = CliRunner().invoke(main, ["check", str(tmp_path)])
    assert result.exit_code == 0
    assert result.output == "1 files, 1 tensors, 2 x BF16: whole.\n"


def test_elements_that_share_a_byte_are_counted_apart(tmp_path):
    """As the file does, and not as torch does."""
    header = b'{"w":{"dtype":"F4","shape":[2,4],"data_offsets":[0,4]}}'
    file = tmp_path / "model.safetensors"
    file.write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 4)
    result = CliRunner().invoke(main, ["check", str(tmp_path)])
    assert result.output == "1 files, 1 tensors, 8 x F4: whole.\n"


@pytest.mark.parametrize("cut", [1, 4, 30, 58])
def test_a_file_that_was_cut_short_is_named(tmp_path, cut):
    """Whatever is missing at the end of a file, the command fails and names the file."""
    write_file(tmp_path / "model.safetensors", cut=cut)
    result = CliRunner().invoke(main, ["check", str(tmp_path)])
    assert result.exit_code == 1
    assert "model.safetensors" in result.output


@pytest.fixture
def indexed(tmp_path):
    """A folder with an index, two files that it names, and one that holds the same again."""
    for name in ("a", "b"):
        write_file(tmp_path / f"{name}.safetensors", name=name)
    write_file(tmp_path / "consolidated.safetensors", name="a")
    names = {name: f"{name}.safetensors" for name in ("a", "b")}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": names}))
    return tmp_path


def test_of_a_folder_with_an_index_the_files_that_it_names_are_checked(indexed):
    """A consolidated file beside them is nobody's business, as when the checkpoint is loaded."""
    result = CliRunner().invoke(main, ["check", str(indexed)])
    assert result.exit_code == 0
    assert result.output == "2 files, 2 tensors, 4 x BF16: whole.\n"


def test_a_file_that_the_index_names_and_that_is_missing_is_named(indexed):
    """The files that are there are not all of the checkpoint."""
    (indexed / "b.safetensors").unlink()
    result = CliRunner().invoke(main, ["check", str(indexed)])
    assert result.exit_code == 1
    assert "b.safetensors" in result.output


def test_a_tensor_that_the_index_names_and_that_no_file_holds_is_named(indexed):
    """The file is whole, and was written without it."""
    write_file(indexed / "b.safetensors", name="c")
    result = CliRunner().invoke(main, ["check", str(indexed)])
    assert result.exit_code == 1
    assert "names tensors that no file holds: b." in result.output


def test_a_folder_without_safetensors_files_is_not_called_whole(tmp_path):
    """Nothing is known about files of other kinds."""
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    result = CliRunner().invoke(main, ["check", str(tmp_path)])
    assert result.exit_code == 1
    assert "holds no *.safetensors file" in result.output


def test_a_type_is_explained():
    """A type without a hook is PLAIN."""
    result = CliRunner().invoke(main, ["explain", "torch.nn:Linear"])
    assert result.output.startswith("Linear (modules) is PLAIN")


@pytest.mark.parametrize(
    "target",
    [
        "torch.nn:Nothing",
        "nowhere:Class",
        "torch.nn",
        "torch.nn:functional",
        ".foo:Bar",
        ":Bar",
        "",
    ],
)
def test_a_name_that_is_no_class_is_refused(target):
    """The message repeats what was given."""
    result = CliRunner().invoke(main, ["explain", target])
    assert result.exit_code == 2
    assert target in result.output


@pytest.mark.parametrize("line", ["1 / 0", "raise SystemExit(0)"])
def test_a_module_that_cannot_be_imported_is_refused(line, tmp_path, monkeypatch):
    """Whatever it does at import, the command says so and fails."""
    (tmp_path / "weightload_broken.py").write_text(line)
    monkeypatch.syspath_prepend(tmp_path)
    result = CliRunner().invoke(main, ["explain", "weightload_broken:Class"])
    assert result.exit_code == 2
    assert ("ZeroDivisionError" if "/" in line else "SystemExit") in result.output


def test_rules_for_vllm_where_there_is_none_are_refused(monkeypatch):
    """The message says what is missing."""
    monkeypatch.setitem(sys.modules, "weightload.vllm.framework", None)
    result = CliRunner().invoke(main, ["explain", "--vllm", "torch.nn:Linear"])
    assert result.exit_code == 2
    assert "--vllm takes vLLM" in result.output
