"""What loaders may look at in modules, apart from the tensors that they load."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, repeat
from operator import itemgetter
from typing import Any

import attrs
import torch
from torch import nn

from weightload.ownership import HOLDER, ForwardGuard

__all__ = ["Settings"]

_NUMBERS = frozenset((int, float, bool, str, bytes, type(None), torch.dtype))
_SMALL = 1 << 16
"""Elements of an integer tensor that is compared by its values."""
_INTEGERS = frozenset((torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64))
_OF_TORCH = frozenset(vars(nn.Module())) - {"training"}
"""What every module keeps for torch's own use."""


@attrs.frozen(eq=False, repr=False)
class _Integers:
    """A small tensor of integers of one module."""

    place: int
    key: str
    value: torch.Tensor

    def holds(self, mine: Mapping[str, Any]) -> bool:
        """Whether a module, whose attributes these are, still has it."""
        tensor = mine["_buffers"].get(self.key, mine.get(self.key))
        if not _is_integers(tensor) or tensor.dtype is not self.value.dtype:
            return False
        return tensor.device == self.value.device and torch.equal(tensor.detach(), self.value)


@attrs.define(eq=False, repr=False)
class Settings:
    """What loaders may look at in modules, apart from tensors that they load.

    That is numbers, texts, small containers of them, and tensors of integers that are no
    parameters, such as maps of experts.

    Attributes:
        sizes: how many attributes each module has.
        getters: get the settings of each module from its attributes.
        values: what they get, containers copied.
        tensors: those of integers.
        others: names in each module that are no settings.
        boxes: the containers themselves, those of all modules one after the other.
        copies: theirs.
        keys: by the place of a module with containers the first of them in ``boxes``, and their names.
    """

    sizes: list[int]
    getters: list[Callable[[dict[str, Any]], Any] | None]
    values: list[Any]
    tensors: list[_Integers]
    others: list[set[str]]
    boxes: list[Any] = attrs.field(factory=list)
    copies: list[Any] = attrs.field(factory=list)
    keys: dict[int, tuple[int, list[str]]] = attrs.field(factory=dict)

    @classmethod
    def of(cls, dicts: list[dict[str, Any]], others: list[set[str]]) -> Settings:
        """Look at modules.

        Args:
            dicts: their attributes.
            others: names in each of them that are something else: what is loaded, and what hooks
                make of it, which is undone before loaders see it.
        """
        made: dict[tuple[str, ...], Callable[[dict[str, Any]], Any]] = {}
        found = cls(_sizes(dicts), [], [], [], others)
        for place, (whole, left) in enumerate(zip(dicts, others, strict=True)):
            mine = {
                key: copy.copy(value)
                for key, value in whole.items()
                if key not in left
                and key not in _OF_TORCH
                and (type(value) in _NUMBERS or _is_container(value))
            }
            getter = made.setdefault(tuple(mine), itemgetter(*mine)) if mine else None
            found.getters.append(getter)
            found.values.append(None if getter is None else getter(mine))
            boxes = [key for key, value in mine.items() if type(value) not in _NUMBERS]
            if boxes:
                found.keys[place] = len(found.boxes), boxes
                found.boxes += [whole[key] for key in boxes]
                found.copies += [mine[key] for key in boxes]
            for key, tensor in _integers(whole):
                if key in left:
                    continue
                found.tensors.append(_Integers(place, key, tensor.detach().clone()))
        return found

    def hold(self, dicts: list[dict[str, Any]], places: Sequence[int]) -> bool:
        """Whether all are what they were.

        Args:
            dicts: the attributes of all modules.
            places: the modules that may have other objects as attributes than the last time.
        """
        mine = [dicts[at] for at in places]
        try:
            now = [
                None if getter is None else getter(one)
                for getter, one in zip([self.getters[at] for at in places], mine, strict=True)
            ]
            same = now == [self.values[at] for at in places] and self.boxes == self.copies
        except Exception:  # a number has become something that cannot be compared, or is gone
            return False
        if not same or not all(one.holds(dicts[one.place]) for one in self.tensors):
            return False
        if not self._no_others(mine, places):
            return False
        for at in self.keys.keys() & places:
            start, keys = self.keys[at]
            self.boxes[start : start + len(keys)] = [dicts[at][key] for key in keys]
        return True

    def _no_others(self, dicts: list[dict[str, Any]], places: Sequence[int]) -> bool:
        """Whether modules that have got new attributes have got no new settings with them."""
        sizes, before = _sizes(dicts), [self.sizes[at] for at in places]
        if sizes == before:
            return True
        other = [i for i in range(len(sizes)) if sizes[i] != before[i]]
        changed = [places[i] for i in other]
        now = Settings.of([dicts[i] for i in other], [self.others[at] for at in changed])
        then = sum(one.place in changed for one in self.tensors)
        if now.values != [self.values[at] for at in changed] or then != len(now.tensors):
            return False
        for i in other:
            self.sizes[places[i]] = sizes[i]
        return True


def _sizes(dicts: list[dict[str, Any]]) -> list[int]:
    """Return how many attributes modules have, without those of open sessions."""
    sizes = [*map(len, dicts)]
    own = [*map(dict.get, dicts, repeat("forward"))]
    if own.count(None) < len(own):
        sizes = [n - (type(one) is ForwardGuard) for n, one in zip(sizes, own, strict=True)]
    if dicts and HOLDER in dicts[0]:
        sizes[0] -= 1
    return sizes


def _is_container(value: Any) -> bool:
    kind = type(value)
    if kind in (list, tuple, set):
        return all(type(one) in _NUMBERS for one in value)
    return kind is dict and bool(value) and all(type(one) in _NUMBERS for one in value.values())


def _integers(mine: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the small tensors of integers that are attributes or buffers of a module."""
    for key, value in chain(mine.items(), mine["_buffers"].items()):
        if _is_integers(value):
            yield key, value


def _is_integers(value: Any) -> bool:
    if not isinstance(value, torch.Tensor) or value.dtype not in _INTEGERS:
        return False
    return value.numel() <= _SMALL and not value.is_meta
