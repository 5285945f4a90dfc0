"""Compares live tensors with what was sent, by a way that the load itself did not take."""

from __future__ import annotations

import ctypes
import hashlib
import zlib
from collections.abc import Callable, Iterable
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
_WINDOW = 1 << 14
"""It looks at so many bytes of a source tensor, and of each place where that goes."""


@attrs.define(kw_only=True, eq=False, repr=False)
class Verification:
    """What one session is going to compare.

    Attributes:
        mode: everything, or a sample that depends on the names and on ``salt``.
        salt: what makes samples of different loads differ; the same on every rank.
        received: digest of each source tensor that is looked at, by name.
        tensors: how many tensors were compared, or parts of them.
        units: how many units were processed a second time.
        nbytes: size of the live tensors, or parts of them, that were compared.
        in_parts: whether parts of sources came, of which each rank gets others.
    """

    mode: Verify
    salt: str
    received: dict[str, int] = attrs.field(factory=dict)
    tensors: int = 0
    units: int = 0
    nbytes: int = 0
    in_parts: bool = False
    _seed: int = attrs.field(init=False)
    _kinds: set[str] = attrs.field(factory=set)
    _sent: dict[int, tuple[Entry, dict[Region, tuple[int, tuple[int, ...]]]]] = attrs.field(
        factory=dict
    )
    _problems: list[str] = attrs.field(factory=list)

    def __attrs_post_init__(self) -> None:
        """Begin what decides about each name with what is the same for all of them."""
        self._seed = zlib.crc32(f"{self.salt} ".encode())

    def wants(self, name: str, kind: str = "") -> bool:
        """Whether what is called ``name`` is looked at; the first of each kind always is."""
        first = kind not in self._kinds
        self._kinds.add(kind)
        return first or self._chosen(name)

    def _chosen(self, name: str) -> bool:
        return self.mode == "full" or zlib.crc32(name.encode(), self._seed) % SAMPLE == 0

    def choose(self, names: Iterable[str]) -> set[str]:
        """Return the names that are looked at even if they are not the first of their kind."""
        return {name for name in names if self._chosen(name)}

    def digest_of(self, tensor: torch.Tensor) -> int:
        """Return the digest of what is looked at of a tensor: all of it, or one part if sampled."""
        return digest(tensor) if self.mode == "full" else _small_digest(self._window(tensor))

    def _window(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a part of a tensor, always the same of tensors of one shape and size."""
        number = zlib.crc32(f"{tuple(tensor.shape)}".encode(), self._seed)
        for dim in range(tensor.dim()):
            size, nbytes = tensor.shape[dim], tensor.numel() * tensor.element_size()
            if nbytes <= _WINDOW:
                break
            count = max(1, _WINDOW * size // nbytes)
            tensor = tensor.narrow(dim, number % (size - count + 1), count)
        return tensor

    def receive(self, name: str, tensor: torch.Tensor) -> None:
        """Note what a source brings under a name."""
        if self.wants(name, "source"):
            self.received[name] = self.digest_of(tensor.detach())

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
            sent = self.digest_of(value.expand(target.shape))
            regions[region] = sent, tuple(target.shape)

    def remember(self, entry: Entry, region: Region, sent: int, shape: tuple[int, ...]) -> None:
        """Note the digest of what was written to a part of a live tensor, in that shape."""
        self._sent.setdefault(id(entry), (entry, {}))[1][region] = sent, shape

    def compare_in_place(self, live_of: Callable[[Entry], torch.Tensor | None]) -> None:
        """Compare every live tensor that was written directly.

        Args:
            live_of: returns the live tensor, or ``None`` if a hook has changed it since.
        """
        for entry, regions in self._sent.values():
            live = live_of(entry) if regions else None
            if live is None:
                continue
            for region, (sent, shape) in regions.items():
                part = select(live, region).reshape(shape)
                self.compare_with(f"{entry.names[0]} {list(region)}", part, sent)

    def compare_with(self, name: str, live: torch.Tensor, sent: int) -> None:
        """Compare a live tensor with the digest of what was sent to it."""
        self._count(live)
        if self.digest_of(live.detach()) != sent:
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


def _small_digest(tensor: torch.Tensor) -> int:
    """Return 64 bits that depend on every byte of a tensor, by one call for what is small."""
    plain = tensor.is_cpu and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())
    host = tensor if plain else tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    octets = (ctypes.c_char * host.nbytes).from_address(host.data_ptr()) if host.nbytes else b""
    return int.from_bytes(hashlib.sha1(octets, usedforsecurity=False).digest()[:8], "little")
