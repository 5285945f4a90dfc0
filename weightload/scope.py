"""What a load promises to bring: declared before it begins, and checked exactly."""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Iterable
from typing import Any

import attrs

from weightload.errors import UnexpectedWeightError, UsageError, name_some

__all__ = ["Scope"]


def _names(value: Iterable[str]) -> tuple[str, ...]:
    names = (value,) if isinstance(value, str) else tuple(value)
    if not all(isinstance(name, str) for name in names):
        raise UsageError(f"A scope is made of names and patterns, found {names!r}.")
    return names


@attrs.frozen(kw_only=True)
class Scope:
    """Which source tensors one load brings; made by :meth:`full` or :meth:`only`.

    Patterns are those of :mod:`fnmatch`: ``*`` and ``?`` match dots as well.

    Attributes:
        names: the names, or patterns of names, that are brought; ``None`` for all.
        allow_missing: names or patterns that may stay away nevertheless.
        allow_unexpected: names or patterns that may come and are dropped.
    """

    names: tuple[str, ...] | None = None
    allow_missing: tuple[str, ...] = ()
    allow_unexpected: tuple[str, ...] = ()

    @classmethod
    def full(
        cls, *, allow_missing: Iterable[str] = (), allow_unexpected: Iterable[str] = ()
    ) -> Scope:
        """Promise everything that the load which made the model brought.

        Args:
            allow_missing: names or patterns of parameters, or of source tensors, that may stay
                away. At the first load such a parameter keeps the value that it was constructed
                with, later the one that it has; what is processed together comes or stays away
                as a whole.
            allow_unexpected: source names or patterns that the model has no place for; they are
                dropped and counted.
        """
        return cls(allow_missing=_names(allow_missing), allow_unexpected=_names(allow_unexpected))

    @classmethod
    def only(cls, names: Iterable[str], *, allow_unexpected: Iterable[str] = ()) -> Scope:
        """Promise exactly these source tensors; everything else keeps its value.

        Args:
            names: source names or patterns, as in the load that made the model. What is
                processed together (the parts of a fused layer that is packed, a weight and its
                scale) must be named as a whole.
            allow_unexpected: as for :meth:`full`.

        Raises:
            UsageError: no name is given.
        """
        wanted = _names(names)
        if not wanted:
            raise UsageError("Scope.only() needs at least one name; nothing would be loaded.")
        return cls(names=wanted, allow_unexpected=_names(allow_unexpected))

    @property
    def is_full(self) -> bool:
        """Whether everything is promised, but for what the allow-list names."""
        return self.names is None

    def resolve(self, known: Collection[str]) -> frozenset[str]:
        """Return the names in ``known`` that this scope promises.

        Raises:
            UnexpectedWeightError: a name or pattern is in none of them.
        """
        if self.names is None:
            return frozenset(known)
        found: set[str] = set()
        strange = []
        for pattern in self.names:
            matching = {pattern} if pattern in known else set(fnmatch.filter(known, pattern))
            found |= matching
            if not matching:
                strange.append(pattern)
        if strange:
            raise UnexpectedWeightError(
                f"The scope names {name_some(strange)}, which the load that made the model did "
                f"not have.",
                names=strange[:10],
            )
        return frozenset(found)

    def may_miss(self, *names: str) -> bool:
        """Whether any of ``names``, which mean the same thing, may stay away."""
        return _matches(self.allow_missing, names)

    def may_come(self, name: str) -> bool:
        """Whether the source name may come although the model has no place for it."""
        return _matches(self.allow_unexpected, (name,))

    def to_plain(self) -> dict[str, Any]:
        """Return the scope as builtin types; :meth:`from_plain` makes it again."""
        return {
            "names": None if self.names is None else list(self.names),
            "allow_missing": list(self.allow_missing),
            "allow_unexpected": list(self.allow_unexpected),
        }

    @classmethod
    def from_plain(cls, data: dict[str, Any]) -> Scope:
        """Make a scope again from what :meth:`to_plain` gave."""
        names = data["names"]
        return cls(
            names=None if names is None else tuple(names),
            allow_missing=tuple(data["allow_missing"]),
            allow_unexpected=tuple(data["allow_unexpected"]),
        )


def _matches(patterns: tuple[str, ...], names: Iterable[str]) -> bool:
    return any(name == one or fnmatch.fnmatchcase(name, one) for name in names for one in patterns)
