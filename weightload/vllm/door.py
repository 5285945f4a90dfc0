"""Keeps requests out of an engine that must not serve."""

from __future__ import annotations

from collections.abc import Callable
from inspect import iscoroutinefunction
from typing import Any

from weightload.errors import ModelBusyError, ModelPoisonedError, WeightLoadError

__all__ = ["Door"]


class Door:
    """Stands in the place of an engine's ``add_request`` while the engine must not serve.

    A request is refused where it comes in, and the engine stays as it is; a worker that refuses
    to run, the last line of defence, takes the engine down.
    """

    def __init__(self, engine: Any) -> None:
        self._own = vars(engine).get("add_request")
        self._asynchronous = iscoroutinefunction(engine.add_request)
        self._refusal: Callable[[], WeightLoadError] = _busy
        vars(engine)["add_request"] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse.

        Raises:
            WeightLoadError: always.
        """
        return self._refuse_later() if self._asynchronous else self._refuse()

    def _refuse(self) -> Any:
        raise self._refusal()

    async def _refuse_later(self) -> Any:
        self._refuse()

    @classmethod
    def hold(cls, engine: Any) -> None:
        """Let ``engine`` take no request while its weights are replaced."""
        if not isinstance(vars(engine).get("add_request"), cls):
            cls(engine)

    @classmethod
    def close(cls, engine: Any, error: BaseException) -> None:
        """Let ``engine`` take no request after ``error`` has left it with a mixture."""
        cause = f"{type(error).__name__}: {error}"
        cls.hold(engine)
        vars(engine)["add_request"]._refusal = lambda: ModelPoisonedError(
            f"The engine must not serve: a reload failed ({cause}) after it had written live "
            f"weights. Reload a complete set of weights first.",
            model_intact=False,
        )

    @classmethod
    def open(cls, engine: Any) -> None:
        """Let ``engine`` take requests again."""
        door = vars(engine).get("add_request")
        if not isinstance(door, cls):
            return
        if door._own is None:
            del vars(engine)["add_request"]
        else:
            vars(engine)["add_request"] = door._own


def _busy() -> WeightLoadError:
    return ModelBusyError(
        "The engine takes no requests: an update of its weights is under way, or was left "
        "without an end. Update it again."
    )
