"""Writes safetensors files by hand, in the order that is given: 8 bytes of length, JSON, data."""

import json
import struct

import torch

NAMES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}


def write(path, state):
    """Write one file; the tensors lie in it as they stand in ``state``. Return its path."""
    table, data = {}, b""
    for name, tensor in state.items():
        octets = bytes(tensor.contiguous().view(-1).view(torch.uint8).tolist())
        span = [len(data), len(data) + len(octets)]
        table[name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": span,
        }
        data += octets
    head = json.dumps(table).encode()
    path.write_bytes(struct.pack("<Q", len(head)) + head + data)
    return path


def write_folder(folder, state, files=2):
    """Write a checkpoint of several files, each with every so manieth tensor. Return the folder."""
    folder.mkdir(exist_ok=True)
    for index in range(files):
        names = list(state)[index::files]
        write(
            folder / f"model-{index + 1:05}-of-{files:05}.safetensors",
            {name: state[name] for name in names},
        )
    return folder
