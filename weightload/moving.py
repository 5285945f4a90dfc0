"""Copies values from one tensor to another by the fastest call that the platform has."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch

__all__ = ["LARGE", "move", "unwatched"]

LARGE = 1 << 20
"""Bytes from which on several threads copy faster than one."""

move: Callable[[int, int, int], object] = ctypes.memmove
"""Copy bytes: ``move(target address, source address, number)``. A third of the time that a tensor's
own ``copy_`` needs for a small run, and on some processors half of it for a large one."""

unwatched: Callable[[], object] = getattr(torch._C, "_DisableTorchDispatch", object)
"""Makes an object during whose life no dispatch mode is asked.

Let go of it in a ``finally`` clause: the traceback of an exception keeps what a function has."""
