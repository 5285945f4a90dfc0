"""What a session did, in numbers, as plain data that pickles and prints."""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from typing import Any

import attrs

__all__ = ["Names", "Receipt"]

_FIRST = 10


@attrs.frozen(kw_only=True)
class Names:
    """A set of names in short.

    Attributes:
        count: how many there are.
        digest: 16 hexadecimal digits that depend on all of them, and not on their order.
        first: the first ten of them in alphabetical order.
    """

    count: int = 0
    digest: str = ""
    first: list[str] = attrs.field(factory=list)

    @classmethod
    def of(cls, names: Collection[str], count: int | None = None) -> Names:
        """Make it from names; ``count`` is given if only some of them are known."""
        if not names:
            return cls()
        ordered = sorted(names)
        text = "\n".join(ordered).encode()
        return cls(
            count=len(ordered) if count is None else count,
            digest=hashlib.sha256(text).hexdigest()[:16],
            first=ordered[:_FIRST],
        )


@attrs.frozen(kw_only=True)
class Receipt:
    """The result of one session on one rank.

    Attributes:
        session: number of the session in its process.
        kind: ``"initial"`` for the first load of a model, ``"reload"`` for every other.
        outcome: the state that the session ended in: finished, aborted or poisoned.
        version: what the caller calls the weights.
        commit: ``"stream"`` or ``"atomic"``.
        model_intact: after an abort, whether the model computes what it computed before.
        cause: why the session was aborted.
        verdict: one sentence on what the model is now.
        scope: what the load promised to bring; see :meth:`weightload.Scope.to_plain`.
        consumed: source tensors that filled at least one region.
        skipped: source tensors that this rank has no place for (an expert of another rank,
            the second name of tied weights), as in the load that the model was made with.
        missing: what never arrived; after a successful load, what was allowed to stay away.
        unexpected: what came and has no place; after a successful load, what was dropped as the
            scope allows.
        duplicate: what filled a place that was filled before.
        bytes_received: size of all source tensors.
        bytes_copied: size of the source tensors that were copied because the model held on to them
            when their memory could change.
        bytes_written: size of all writes into the model by loaders.
        bytes_committed: size of all copies from staging into live storage.
        casts: source tensors that were stored in another dtype than they arrived in.
        layers_in_place: modules with tensors that loaders wrote directly.
        layers_staged: units that were staged, processed and committed.
        tensors_in_place: parameters and buffers that loaders wrote directly.
        tensors_staged: parameters and buffers that went through staging.
        tensors_checked: live tensors whose storage was compared with its fingerprint.
        tensors_derived: tensors outside parameters and buffers that took their new value into
            their old storage.
        tensors_moved: tensors outside parameters and buffers that could not keep their storage.
        moved: the first ten of them, and of the opaque objects that were made anew, with reasons.
        hooks_run: how many post-processing hooks ran.
        hooks_spared: how many did not, because they do the same whatever is loaded.
        hooks_in_pieces: how many did not, because what they do was done to each piece of a tensor
            as it came.
        staging_peak_bytes: most memory that staging held at once.
        verified: what was compared, if that was asked for: ``mode``, ``tensors``, ``units``,
            ``nbytes``, and ``digest`` of what was received, ``None`` if a plan was replayed.
        seconds: time spent in each phase. Two of them are not the model's: ``"source"``, the part of
            ``"load"`` in which an iterator was asked for its next tensor, or files were read; and
            ``"between"``, from one call of the session to the next, where callers wait for a
            transport.
        blocked_seconds: from the first live write until the session ended: the time in which the
            model could not compute, however long the transfer took before it. 0 if nothing live
            was written.
        layer_seconds: time spent in processing and committing each unit.
        rank: rank of the process that made this receipt.
    """

    session: int
    kind: str
    outcome: str
    version: str | int | None
    commit: str
    model_intact: bool
    cause: str | None = None
    verdict: str = ""
    scope: dict[str, Any] = attrs.field(factory=dict)
    consumed: Names = attrs.field(factory=Names)
    skipped: Names = attrs.field(factory=Names)
    missing: Names = attrs.field(factory=Names)
    unexpected: Names = attrs.field(factory=Names)
    duplicate: Names = attrs.field(factory=Names)
    bytes_received: int = 0
    bytes_copied: int = 0
    bytes_written: int = 0
    bytes_committed: int = 0
    casts: int = 0
    layers_in_place: int = 0
    layers_staged: int = 0
    tensors_in_place: int = 0
    tensors_staged: int = 0
    tensors_checked: int = 0
    tensors_derived: int = 0
    tensors_moved: int = 0
    hooks_run: int = 0
    hooks_spared: int = 0
    hooks_in_pieces: int = 0
    staging_peak_bytes: int = 0
    moved: list[str] = attrs.field(factory=list)
    verified: dict[str, Any] | None = None
    seconds: dict[str, float] = attrs.field(factory=dict)
    blocked_seconds: float = 0.0
    layer_seconds: dict[str, float] = attrs.field(factory=dict, repr=False)
    rank: int = 0

    def to_plain(self) -> dict[str, Any]:
        """Return the receipt as builtin types; :meth:`from_plain` makes it again."""
        return attrs.asdict(self)

    @classmethod
    def from_plain(cls, data: dict[str, Any]) -> Receipt:
        """Make a receipt again from what :meth:`to_plain` gave, maybe in another version."""
        known = {key: value for key, value in data.items() if key in attrs.fields_dict(cls)}
        names = {key: Names(**data[key]) for key in _NAMES if key in data}
        return cls(**{**known, **names})


_NAMES = tuple(
    field.name for field in attrs.fields(Receipt) if field.type in (Names, Names.__name__)
)
