"""Tensors of safetensors files that are read when they are asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from weightload.files import Header

__all__ = ["LazyCheckpoint"]

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""The names of types in safetensors files (https://huggingface.co/docs/safetensors)."""


class LazyCheckpoint(Mapping[str, Any]):
    """Shapes and types of a checkpoint's tensors, and the tensors themselves when they are asked for."""

    def __init__(self, headers: dict[str, Header]) -> None:
        self._headers = headers

    def __getitem__(self, name: str) -> Any:
        header = self._headers[name]
        dtype = _DTYPES.get(header.dtype)
        return header.shape if dtype is None else (header.shape, dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self._headers)

    def __len__(self) -> int:
        return len(self._headers)

    def tensor(self, name: str) -> torch.Tensor:
        """Read one tensor."""
        from safetensors import safe_open

        with safe_open(self._headers[name].file, framework="pt") as opened:
            found: torch.Tensor = opened.get_tensor(name)
        return found

    def pairs(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Read all tensors, one after another, in the order of the files."""
        from safetensors import safe_open

        for file in dict.fromkeys(header.file for header in self._headers.values()):
            with safe_open(file, framework="pt") as opened:
                for name, header in self._headers.items():
                    if header.file == file:
                        yield name, opened.get_tensor(name)
