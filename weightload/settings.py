"""What loaders may look at in modules, apart from the tensors that they load."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping
from operator import itemgetter
from typing import Any

import attrs
import torch
from torch import nn

from weightload.pairs import same_bits

__all__ = ["Settings"]

_NUMBERS = frozenset((int, float, bool, str, bytes, type(None), torch.dtype))
_SMALL = 1 << 16
"""Elements of an integer tensor that is compared by its values."""
_INTEGERS = frozenset((torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64))
_OF_TORCH = frozenset(vars(nn.Module())) - {"training", "_non_persistent_buffers_set"}
"""What every module keeps for torch's own use, and no loader looks at."""


@attrs.frozen(eq=False, repr=False)
class _Integers:
    """A small tensor of integers of one module.

    Attributes:
        place: of the module.
        buffer: whether it is a buffer, or an attribute otherwise.
        key: its name.
        value: a copy of it.
    """

    place: int
    buffer: bool
    key: str
    value: torch.Tensor

    def holds(self, mine: Mapping[str, Any]) -> bool:
        """Whether a module, whose attributes these are, still has it."""
        tensor: Any = (mine["_buffers"] if self.buffer else mine).get(self.key)
        if not _is_integers(tensor) or tensor.dtype is not self.value.dtype:
            return False
        if tensor.device != self.value.device:
            return False
        if tensor.layout is self.value.layout is torch.strided:
            return torch.equal(tensor.detach(), self.value)  # much quicker
        return same_bits(tensor, self.value)


@attrs.define(eq=False, repr=False)
class Settings:
    """What loaders may look at in modules, apart from tensors that they load.

    That is numbers, texts, small containers of them, and tensors of integers that are no
    parameters, such as maps of experts.

    Attributes:
        keys: the names of all attributes of each module.
        getters: get the settings of each module, without tensors, from its attributes.
        values: what they got, containers copied.
        tensors: those of integers.
        others: names in each module that are no settings.
    """

    keys: list[tuple[str, ...]]
    getters: list[Callable[[dict[str, Any]], Any] | None]
    values: list[Any]
    tensors: list[_Integers]
    others: list[set[str]]

    @classmethod
    def of(cls, dicts: list[dict[str, Any]], others: list[set[str]]) -> Settings:
        """Look at modules.

        Args:
            dicts: their attributes.
            others: names in each of them that are something else: what is loaded, and what hooks
                make of it, which is undone before loaders see it.
        """
        made: dict[tuple[str, ...], Callable[[dict[str, Any]], Any]] = {}
        found = cls([*map(tuple, dicts)], [], [], [], others)
        for place, (whole, left) in enumerate(zip(dicts, others, strict=True)):
            mine = {
                key: copy.copy(value)
                for key, value in whole.items()
                if _is_setting(key, value, left) and not isinstance(value, torch.Tensor)
            }
            getter = made.setdefault(tuple(mine), itemgetter(*mine)) if mine else None
            found.getters.append(getter)
            found.values.append(None if getter is None else getter(mine))
            for buffer, key, tensor in _integers(whole):
                if key not in left:
                    found.tensors.append(_Integers(place, buffer, key, tensor.detach().clone()))
        return found

    def hold(self, dicts: list[dict[str, Any]]) -> bool:
        """Whether all are what they were."""
        try:
            now = [
                None if getter is None else getter(mine)
                for getter, mine in zip(self.getters, dicts, strict=True)
            ]
            same = now == self.values
        except Exception:  # a number has become something that cannot be compared, or is gone
            return False
        return (
            same
            and all(one.holds(dicts[one.place]) for one in self.tensors)
            and self._no_others(dicts)
        )

    def _no_others(self, dicts: list[dict[str, Any]]) -> bool:
        """Whether modules that have got new attributes have got no new settings with them."""
        keys = [*map(tuple, dicts)]
        if keys == self.keys:
            return True
        for at, (now, before) in enumerate(zip(keys, self.keys, strict=True)):
            if now == before:
                continue
            mine = dicts[at]
            if any(_is_setting(key, mine[key], self.others[at]) for key in {*now} - {*before}):
                return False
            self.keys[at] = now
        return True


def _is_setting(key: str, value: Any, others: Collection[str]) -> bool:
    """Whether loaders may look at an attribute of a module for its value."""
    if key in others or key in _OF_TORCH:
        return False
    return type(value) in _NUMBERS or _is_container(value) or _is_integers(value)


def _is_container(value: Any) -> bool:
    kind = type(value)
    if kind in (list, tuple, set):
        return all(type(one) in _NUMBERS for one in value)
    return kind is dict and bool(value) and all(type(one) in _NUMBERS for one in value.values())


def _integers(mine: Mapping[str, Any]) -> Iterator[tuple[bool, str, torch.Tensor]]:
    """Yield the small tensors of integers of a module: whether it is a buffer, name and tensor."""
    for buffer, table in ((False, mine), (True, mine["_buffers"])):
        for key, value in table.items():
            if _is_integers(value):
                yield buffer, key, value


def _is_integers(value: Any) -> bool:
    if not isinstance(value, torch.Tensor) or value.dtype not in _INTEGERS:
        return False
    return value.numel() <= _SMALL and not value.is_meta
