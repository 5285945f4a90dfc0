"""Compares live tensors with what was sent, by a way that the load itself did not take."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import attrs
import torch

from weightload.digest import digest
from weightload.errors import VerificationError, name_some
from weightload.ledger import Region, meet
from weightload.storage import select

if TYPE_CHECKING:
    from weightload.entries import Entry

__all__ = ["SAMPLE", "Verification", "Verify"]

Verify = Literal["sampled", "full"]
SAMPLE = 64
"""A sampled verification looks at one of so many source tensors, and of so many units."""


@attrs.define(kw_only=True, eq=False, repr=False)
class Verification:
    """What one session is going to compare.

    Attributes:
        mode: everything, or a sample that depends on the names and on ``salt``.
        salt: what makes samples of different loads differ; the same on every rank.
        received: digest of each source tensor that is looked at, by name.
        tensors: how many tensors were compared, or parts of them.
        units: how many units were processed a second time.
        nbytes: how many live bytes were compared.
        in_parts: whether parts of sources came, of which each rank gets others.
    """

    mode: Verify
    salt: str
    received: dict[str, int] = attrs.field(factory=dict)
    tensors: int = 0
    units: int = 0
    nbytes: int = 0
    in_parts: bool = False
    _kinds: set[str] = attrs.field(factory=set)
    _sent: dict[int, tuple[Entry, dict[Region, int]]] = attrs.field(factory=dict)
    _problems: list[str] = attrs.field(factory=list)

    def wants(self, name: str, kind: str = "") -> bool:
        """Whether what is called ``name`` is looked at; the first of each kind always is."""
        first = kind not in self._kinds
        self._kinds.add(kind)
        chosen = zlib.crc32(f"{self.salt} {name}".encode()) % SAMPLE == 0
        return self.mode == "full" or first or chosen

    def receive(self, name: str, tensor: torch.Tensor) -> None:
        """Note what a source brings under a name."""
        if self.wants(name, "source"):
            self.received[name] = digest(tensor)

    def note(
        self, entry: Entry, region: Region | None, target: torch.Tensor, source: torch.Tensor | None
    ) -> None:
        """Note a write into a live tensor; what is not a plain copy has no digest."""
        regions = self._sent.setdefault(id(entry), (entry, {}))[1]
        for other in [one for one in regions if region is None or meet(one, region)]:
            del regions[other]
        if region is None or source is None:
            return
        if self.wants(f"{entry.names[0]} {region}", "place"):
            value = source.detach().to(target.device, target.dtype)
            regions[region] = digest(value.expand(target.shape))

    def remember(self, entry: Entry, region: Region, sent: int) -> None:
        """Note the digest of what was written to a part of a live tensor."""
        self._sent.setdefault(id(entry), (entry, {}))[1][region] = sent

    def compare_in_place(self, live_of: Callable[[Entry], torch.Tensor | None]) -> None:
        """Compare every live tensor that was written directly.

        Args:
            live_of: returns the live tensor, or ``None`` if a hook has changed it since.
        """
        for entry, regions in self._sent.values():
            live = live_of(entry) if regions else None
            if live is None:
                continue
            for region, sent in regions.items():
                self.compare_with(f"{entry.names[0]} {list(region)}", select(live, region), sent)

    def compare_with(self, name: str, live: torch.Tensor, sent: int) -> None:
        """Compare a live tensor with the digest of what was sent to it."""
        self._count(live)
        if digest(live) != sent:
            self._problems.append(name)

    def compare(self, name: str, live: torch.Tensor, other: torch.Tensor) -> None:
        """Compare a live tensor with what a second processing gave."""
        self._count(live)
        if digest(live) != digest(other):
            self._problems.append(name)

    def _count(self, live: torch.Tensor) -> None:
        self.tensors += 1
        self.nbytes += live.numel() * live.element_size()

    def check(self) -> None:
        """Raise if anything differed.

        Raises:
            VerificationError: a live tensor does not hold what was sent; all are named.
        """
        if self._problems:
            raise VerificationError(
                f"{len(self._problems)} live tensors do not hold what was sent: "
                f"{name_some(self._problems)}. Something wrote to them behind the session, or a "
                f"hook does not give the same result twice.",
                names=self._problems[:10],
            )

    @property
    def digest(self) -> str | None:
        """One text for everything that was looked at of what came, the same on ranks that agree.

        ``None`` where parts came, which ranks that agree do not have in common.
        """
        if self.in_parts:
            return None
        text = repr(sorted(self.received.items()))
        return f"{zlib.crc32(text.encode()):08x}-{len(self.received)}"
