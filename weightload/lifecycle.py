"""The same session for callers whose steps are separate calls, such as RPCs."""

from __future__ import annotations

from typing import Any

from torch import nn

from weightload.errors import UsageError
from weightload.ownership import open_session
from weightload.receipt import Receipt
from weightload.session import WeightLoadSession

__all__ = ["abort_reload", "finish_reload", "start_reload"]

_ATTRIBUTE = "_weightload_open"


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
    vars(model)[_ATTRIBUTE] = session
    return session


def finish_reload(model: nn.Module) -> Receipt:
    """Finish the session that is open on ``model``.

    Raises:
        UsageError: none is open.
        WeightLoadError: as :meth:`WeightLoadSession.finish` does.
    """
    session = _session_of(model)
    try:
        return session.finish()
    finally:
        _forget(model, session)


def abort_reload(model: nn.Module, cause: str = "aborted by the caller") -> Receipt:
    """Abort the session that is open on ``model``.

    Raises:
        UsageError: none is open.
    """
    session = _session_of(model)
    try:
        return session.abort(cause)
    finally:
        _forget(model, session)


def _session_of(model: nn.Module) -> WeightLoadSession:
    session = open_session(model)
    if session is None:
        vars(model).pop(_ATTRIBUTE, None)
        raise UsageError(
            "No session is open on this model; it was never started, or has ended. Call "
            "start_reload first."
        )
    return session


def _forget(model: nn.Module, session: WeightLoadSession) -> None:
    if not session.state.open:
        vars(model).pop(_ATTRIBUTE, None)
