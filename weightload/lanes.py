"""Keeps a load on one stream of its device, in order with the streams that sources work on.

A source may write on streams of its own, and make them current while it is iterated. What it wrote
must be there when the loaders read it, and must be read before it writes there again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import attrs
import torch

__all__ = ["Lane", "accelerator"]


def accelerator() -> Any | None:
    """Return torch's module for the device with streams, if one is in use in this process."""
    return torch.cuda if torch.cuda.is_initialized() else None


@attrs.define(eq=False, repr=False)
class Lane:
    """The stream that the loaders of one session work on.

    All that a session does is done on one stream, the one that was current when it first loaded:
    so its memory belongs to that stream, and its steps are in order, whatever is current in
    later calls.

    Attributes:
        api: returns what has ``current_stream``, ``set_stream`` and ``Event``, as ``torch.cuda``
            has; ``None`` where there are no streams.
        single_stream: wait for the device where otherwise an event would do.
    """

    api: Callable[[], Any | None] = accelerator
    single_stream: bool = False
    _home: Any = None
    _away: Any = None
    _inside: bool = False

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Work on the session's stream inside the block; all of it is done when the block ends.

        That the host waits is what makes it safe to reuse a buffer after ``load`` has returned,
        also for another process, which knows nothing of this one's streams.
        """
        api = self.api()
        if api is None or self._inside:
            yield
            return
        outside = api.current_stream()
        if self._home is None:
            self._home = outside
        home = self._home
        self._follow(api, home, outside)
        api.set_stream(home)
        self._inside = True
        try:
            yield
        finally:
            self._inside, self._away = False, None
            api.set_stream(outside)
            home.synchronize()

    def _follow(self, api: Any, later: Any, earlier: Any) -> None:
        """Let ``later`` wait for what is on ``earlier`` now."""
        if later != earlier:
            event = api.Event()
            event.record(earlier)
            later.wait_event(event)

    def arrived(self, tensor: torch.Tensor) -> None:
        """Order the loaders after the source, which has just given ``tensor``."""
        api = self.api()
        if api is None or not self._inside:
            return
        source = api.current_stream()
        if self.single_stream:
            source.synchronize()
        if source != self._home:
            self._away = source
            self._follow(api, self._home, source)
            if tensor.device.type != "cpu":
                tensor.record_stream(self._home)
            api.set_stream(self._home)

    def asking(self, tensor: torch.Tensor | None) -> None:
        """Order the source, which is about to be asked for the next, after the loaders.

        Args:
            tensor: what it gave last.
        """
        api = self.api()
        if api is None or not self._inside:
            return
        pinned = tensor is not None and tensor.device.type == "cpu" and tensor.is_pinned()
        if self.single_stream or pinned:  # the host may write to pinned memory past all streams
            self._home.synchronize()
        if self._away is not None:
            self._follow(api, self._away, self._home)
            api.set_stream(self._away)
            self._away = None
