"""Memory for staging that is kept from layer to layer and from session to session.

Fresh pages cost more than the copy into them: the system has to clear each before its first use.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["Pool"]

_Key = tuple[int, torch.device]


class Pool:
    """Blocks of memory, by size and device.

    What is kept between sessions is one block of each size: what a stream needs that brings one layer
    after the other. Of devices nothing is kept, since PyTorch keeps what it has from them itself.

    Attributes:
        crowded: whether much waited at once in the last session, so that much will in the next one.
    """

    def __init__(self) -> None:
        self.crowded = False
        self._free: dict[_Key, list[torch.UntypedStorage]] = {}

    def __deepcopy__(self, memo: Any) -> Pool:
        """A copy of a model does not use the memory of the original."""
        return Pool()

    @property
    def nbytes(self) -> int:
        """Bytes that are kept now."""
        return sum(size * len(blocks) for (size, _), blocks in self._free.items())

    def take(self, nbytes: int, device: torch.device) -> torch.UntypedStorage:
        """Return memory of ``nbytes``; what it holds is arbitrary."""
        blocks = self._free.get((nbytes, device))
        if blocks:
            return blocks.pop()
        return torch.empty(nbytes, dtype=torch.uint8, device=device).untyped_storage()

    def give(self, block: torch.UntypedStorage) -> bool:
        """Take memory back, unless somebody else still looks into it; return whether that was so."""
        holders = getattr(torch._C, "_storage_Use_Count", None)
        free = holders is not None and holders(block._cdata) == 1
        if free:
            self._free.setdefault((block.nbytes(), block.device), []).append(block)
        return free

    def trim(self, most: int) -> None:
        """Give back what the next session does not need: more than ``most`` blocks of one size."""
        for (_, device), blocks in self._free.items():
            del blocks[most if device.type == "cpu" else 0 :]
