"""Tells programs and people how far a long load has come."""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable, Collection, Mapping
from typing import Any, TextIO

import attrs

__all__ = ["LoadProgress", "ProgressBar", "Reporter", "size_of"]

EVERY = 0.1
"""Seconds between two reports."""


@attrs.frozen(kw_only=True)
class LoadProgress:
    """How far one call of :meth:`WeightLoadSession.load` has come.

    Attributes:
        tensors: how many source tensors have come.
        nbytes: their size.
        tensors_total: how many will come; ``None`` if nobody knows.
        nbytes_total: their size; ``None`` if nobody knows.
        seconds: time since the call began.
        ended: whether this is the last report of the call, which may have failed.
    """

    tensors: int
    nbytes: int
    tensors_total: int | None
    nbytes_total: int | None
    seconds: float
    ended: bool = False


class Reporter:
    """Calls back from time to time, and never lets the load fail because of that.

    Args:
        callback: gets a :class:`LoadProgress`. After an exception, which is given out as a warning,
            it is not called again.
        tensors_total: how many tensors will come, if that is known.
        nbytes_total: their size, if that is known.
    """

    def __init__(
        self,
        callback: Callable[[LoadProgress], object],
        tensors_total: int | None = None,
        nbytes_total: int | None = None,
    ) -> None:
        self._callback: Callable[[LoadProgress], object] | None = callback
        self._totals = tensors_total, nbytes_total
        self._started = time.perf_counter()
        self._last = -EVERY

    def tell(self, tensors: int, nbytes: int, *, ended: bool = False) -> None:
        """Report how much has come, unless it has been done a moment ago."""
        seconds = time.perf_counter() - self._started
        if self._callback is None or (seconds - self._last < EVERY and not ended):
            return
        self._last = seconds
        tensors_total, nbytes_total = self._totals
        report = LoadProgress(
            tensors=tensors,
            nbytes=nbytes,
            tensors_total=tensors_total,
            nbytes_total=nbytes_total,
            seconds=seconds,
            ended=ended,
        )
        try:
            self._callback(report)
        except Exception as error:
            self._callback = None
            warnings.warn(
                f"A progress callback raised {type(error).__name__}: {error}. The load goes on, "
                f"and it is not called again.",
                RuntimeWarning,
                stacklevel=2,
            )


def size_of(weights: Collection[Any]) -> int | None:
    """Return the bytes of tensors that are at hand, ``None`` if they are not what they should be."""
    values = weights.values() if isinstance(weights, Mapping) else (pair[-1] for pair in weights)
    try:
        return int(sum(tensor.nbytes for tensor in values))
    except (AttributeError, LookupError, TypeError):
        return None  # which the load is going to say


class ProgressBar:
    """A callback that draws a bar on a terminal; it needs the package ``tqdm``.

    Without ``tqdm``, and where the stream is no terminal, it draws nothing.

    Args:
        what: stands before the bar.
        stream: where it is drawn, by default standard error.
    """

    def __init__(self, what: str = "Loading weights", stream: TextIO | None = None) -> None:
        self._what = what
        self._stream = sys.stderr if stream is None else stream
        self._bar: Any = None

    def __call__(self, progress: LoadProgress) -> None:
        """Draw what has come."""
        if self._bar is None and self._stream.isatty():
            try:
                from tqdm import tqdm
            except ImportError:
                return
            self._bar = tqdm(
                desc=self._what,
                total=progress.nbytes_total,
                unit="B",
                unit_scale=True,
                file=self._stream,
                dynamic_ncols=True,
            )
        if self._bar is None:
            return
        self._bar.set_postfix_str(_counted(progress), refresh=False)
        self._bar.update(progress.nbytes - self._bar.n)
        if progress.ended:
            self._bar.close()
            self._bar = None


def _counted(progress: LoadProgress) -> str:
    of = "" if progress.tensors_total is None else f"/{progress.tensors_total}"
    return f"{progress.tensors}{of} tensors"
