"""What a session did, in numbers, as plain data that pickles and prints."""

from __future__ import annotations

from typing import Any

import attrs

__all__ = ["Receipt"]


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
        names_consumed: source tensors that filled at least one region.
        names_skipped: source tensors that this rank has no place for (an expert of another rank,
            the second name of tied weights), as in the load that the model was made with.
        bytes_received: size of all source tensors.
        bytes_written: size of all writes into the model by loaders.
        bytes_committed: size of all copies from staging into live storage.
        casts: source tensors that were stored in another dtype than they arrived in.
        tensors_in_place: parameters and buffers that loaders wrote directly.
        tensors_staged: parameters and buffers that went through staging.
        tensors_checked: live tensors whose storage was compared with its fingerprint.
        tensors_derived: tensors outside parameters and buffers that took their new value into
            their old storage.
        tensors_moved: tensors outside parameters and buffers that could not keep their storage.
        hooks_run: how many post-processing hooks ran.
        staging_peak_bytes: most memory that staging held at once.
        seconds: time spent in each phase.
        rank: rank of the process that made this receipt.
    """

    session: int
    kind: str
    outcome: str
    version: str | int | None
    commit: str
    model_intact: bool
    cause: str | None = None
    names_consumed: int = 0
    names_skipped: int = 0
    bytes_received: int = 0
    bytes_written: int = 0
    bytes_committed: int = 0
    casts: int = 0
    tensors_in_place: int = 0
    tensors_staged: int = 0
    tensors_checked: int = 0
    tensors_derived: int = 0
    tensors_moved: int = 0
    hooks_run: int = 0
    staging_peak_bytes: int = 0
    seconds: dict[str, float] = attrs.field(factory=dict)
    rank: int = 0

    def to_plain(self) -> dict[str, Any]:
        """Return the receipt as builtin types; :meth:`from_plain` makes it again."""
        return attrs.asdict(self)

    @classmethod
    def from_plain(cls, data: dict[str, Any]) -> Receipt:
        """Make a receipt again from what :meth:`to_plain` gave."""
        return cls(**data)
