"""Knows, by their memory, the source tensors that are in the hands of a model's loaders."""

from __future__ import annotations

from collections.abc import Collection

import attrs
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from weightload.storage import extent_of, storage_key

__all__ = ["Hands", "Place"]


@attrs.frozen
class Place:
    """Where a source tensor is: several may be parts of one buffer.

    Attributes:
        name: its name.
        start: first byte in its storage.
        stop: byte after the last one.
        hold: keeps the key of the storage from being used for another one; holds no memory.
        own: whether the memory is the model's alone, so that it may be read in later calls.
    """

    name: str
    start: int
    stop: int
    hold: StorageWeakRef
    own: bool = False

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor, own: bool) -> Place:
        """Look where a tensor is."""
        start, stop = extent_of(tensor)
        stop = max(stop, start + 1)
        return cls(name, start, stop, StorageWeakRef(tensor.untyped_storage()), own)


@attrs.define(repr=False)
class Hands:
    """What loaders may hold, and copy from.

    Attributes:
        places: where the tensors are, by the key of their storage.
    """

    places: dict[int, list[Place]] = attrs.field(factory=dict)

    def enter(self, name: str, tensor: torch.Tensor, own: bool) -> None:
        """Note what is in the hands of the loaders.

        Args:
            name: its name.
            tensor: what they have got.
            own: whether the memory is the model's alone.
        """
        key = storage_key(tensor)
        if key is not None:
            self.places.setdefault(key, []).append(Place.of(name, tensor, own))

    def name_in(self, key: int, source: torch.Tensor, current: str | None) -> str:
        """Return the name of the tensor that ``source`` is a part of.

        Args:
            key: that of its storage, which is in :attr:`places`.
            source: a tensor.
            current: the name that the loaders asked for last; it counts where nothing else tells.
        """
        places = self.places[key]
        start = source.storage_offset() * source.element_size()
        inside = [place.name for place in places if place.start <= start < place.stop]
        if current in inside or not inside:
            return current or places[-1].name
        return inside[-1]

    def own(self) -> set[int]:
        """Return the storages that are the model's alone."""
        return {key for key, places in self.places.items() if places[0].own}

    def keep(self, own: Collection[int]) -> None:
        """Forget all storages but those in ``own``: a model may write these in a later call."""
        self.places = {
            key: self.places[key] for key in own if not self.places[key][0].hold.expired()
        }
