"""Keeps Python's collector of cycles from running where it would find nothing and take long.

A session makes some objects for every tensor and lets go of nearly all of them when it ends. While they
live, their number alone can make the collector walk over everything that the process holds, which takes
longer than the session does.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["paused"]

_lock = threading.Lock()
_inside = 0
_enabled = False


@contextmanager
def paused() -> Iterator[None]:
    """Let no collection begin while the block runs; for blocks that call no code of others."""
    global _inside, _enabled
    with _lock:
        if _inside == 0:
            _enabled = gc.isenabled()
            gc.disable()
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if _inside == 0 and _enabled:
                gc.enable()
