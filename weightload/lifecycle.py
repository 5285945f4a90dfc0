"""The same session for callers whose steps are separate calls, such as RPCs."""

from __future__ import annotations

from typing import Any

from torch import nn

from weightload.errors import UsageError
from weightload.ownership import HOLDER, open_session
from weightload.receipt import Receipt
from weightload.session import WeightLoadSession

__all__ = ["abort_reload", "finish_reload", "start_reload"]


def start_reload(model: nn.Module, **options: Any) -> WeightLoadSession:
    """Open a session on ``model`` that stays open until finished or aborted.

    The model keeps the session alive, so the caller need not keep what is returned.

    Args:
        model: the root module.
        options: as for :class:`WeightLoadSession`.

    Raises:
        ModelBusyError, SessionMisnestedError: another session owns a module of the model.
    """
    session = WeightLoadSession(model, **options)
    session.prepare()
    vars(model)[HOLDER] = session
    return session


def finish_reload(model: nn.Module) -> Receipt:
    """Finish the session that is open on ``model``.

    Raises:
        UsageError: none is open.
        WeightLoadError: as :meth:`WeightLoadSession.finish` does.
    """
    return _session_of(model).finish()


def abort_reload(model: nn.Module, cause: str = "aborted by the caller") -> Receipt:
    """Abort the session that is open on ``model``.

    Raises:
        UsageError: none is open.
    """
    return _session_of(model).abort(cause)


def _session_of(model: nn.Module) -> WeightLoadSession:
    session = open_session(model)
    if session is None:
        raise UsageError(
            "No session is open on this model; it was never started, or has ended. Call "
            "start_reload first."
        )
    return session
