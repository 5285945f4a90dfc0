"""Tensors that loaders bind to modules which no hook processes: new values into the old storage.

Some models make tensors at the end of their ``load_weights`` and keep them as plain attributes. No
hook makes them, so their module is not parked; but graphs know them like all others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import attrs
from torch import nn

from weightload.derived import Reconciliation
from weightload.ownership import ForwardGuard
from weightload.places import tensors_in
from weightload.record import MISSING, SECTIONS, ObjectState

__all__ = ["ReboundAttributes"]

_STRUCTURE = frozenset((*SECTIONS, "_modules", "load_weights"))


@attrs.define(eq=False, repr=False)
class ReboundAttributes:
    """The attributes of modules as they were when a session opened.

    Attributes:
        found: what is copied, and what could not keep its storage; filled by :meth:`plan`.
    """

    found: Reconciliation = attrs.field(factory=Reconciliation)
    _before: list[tuple[str, ObjectState]] = attrs.field(factory=list)
    _puts: list[tuple[dict[str, Any], str, Any]] = attrs.field(factory=list)

    @classmethod
    def of(cls, modules: Mapping[str, nn.Module]) -> ReboundAttributes:
        """Look at ``modules``."""
        return cls(before=[(name, ObjectState.of(module)) for name, module in modules.items()])

    def _changes(self) -> Iterator[tuple[str, ObjectState, str, Any, Any]]:
        """Yield path, state, name, old value and new value of what was bound anew.

        What held no tensor when the session opened is the model's own business.
        """
        for path, state in self._before:
            mine = vars(state.owner)
            for name in dict.fromkeys((*state.values, *mine)):
                old, new = state.values.get(name, MISSING), mine.get(name, MISSING)
                if old is new or name in _STRUCTURE or name.startswith("_weightload"):
                    continue
                # A list that a loader collects in was perhaps empty when the session opened.
                held = state.contents.get(name, old)
                if type(new) is not ForwardGuard and _has_tensors(held):
                    yield (f"{path}.{name}" if path else name), state, name, held, new

    def plan(self) -> list[str]:
        """Work out what is to be copied; return what cannot keep its storage, with reasons."""
        self.found, self._puts = Reconciliation(), []
        for path, state, name, old, new in self._changes():
            kept = self.found.match(old, new, path)
            if kept is not new:
                self._puts.append((vars(state.owner), name, kept))
        opaque = [f"{path}: an opaque object was made anew" for path in self.found.opaque_paths]
        return [*self.found.moved, *opaque]

    @property
    def changes_something(self) -> bool:
        """Whether a commit is going to change a live tensor."""
        return bool(self.found.copies or self._puts)

    def commit(self) -> int:
        """Copy the new values and put the old tensors back; return the number of bytes."""
        nbytes = self.found.pairs.copy()
        self.found.apply()
        for mine, name, kept in self._puts:
            mine[name] = kept
        return nbytes

    def restore(self) -> None:
        """Bind the old tensors again."""
        for _, state, name, _, _ in list(self._changes()):
            state.restore_one(name)

    def close(self) -> None:
        """Let go of everything."""
        self._before.clear()
        self._puts.clear()
        self.found = Reconciliation()


def _has_tensors(value: Any) -> bool:
    return value is not MISSING and any(True for _ in tensors_in(value, ""))
