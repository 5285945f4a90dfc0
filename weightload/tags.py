"""Tells whether dictionaries have been changed, without looking into them.

Python, or torch where Python does not, gives a dictionary a number that no other one has had, and a new
one with each change. So whatever has the number that it had is the same dictionary with the same objects
at the same keys; what is inside these objects is another question.

Source: PEP 509; ``torch/csrc/dynamo/guards.cpp``, which counts by watching dictionaries where Python has
given its own count up.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch

__all__ = ["Tags", "tags_of"]

Tags = list[int]

_of: Any = getattr(getattr(torch._C._dynamo, "guards", None), "dict_version", None)
_locked: Any = getattr(sys, "_is_gil_enabled", lambda: True)


def tags_of(dicts: Iterable[dict[Any, Any]]) -> Tags | None:
    """Return the numbers of dictionaries; ``None`` if nobody counts, or not in all threads."""
    return None if _of is None or not _locked() else [*map(_of, dicts)]
