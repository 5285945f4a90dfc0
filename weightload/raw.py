"""Makes sessions of calls of a model's ``load_weights`` that come from outside of any, or refuses them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from typing import Any, Literal
from weakref import WeakSet

from torch import nn

from weightload.errors import ModelBusyError, UsageError
from weightload.framework import Framework
from weightload.intake import pairs_of
from weightload.ownership import current_session, open_session, owner_of
from weightload.record import record_of
from weightload.session import WeightLoadSession

__all__ = ["in_session"]

OnRaw = Literal["session", "refuse"]
_first: WeakSet[nn.Module] = WeakSet()
"""Models that were loaded once by such a call."""


def in_session(
    load_weights: Callable[..., Any] | None = None,
    *,
    on_raw: OnRaw = "session",
    framework: Callable[[Any], Framework | None] | None = None,
    **options: Any,
) -> Any:
    """Decorate the ``load_weights`` method of a model's class.

    A call from inside a session goes through. A call while a session is open on the model is given
    to that session. Any other call is *raw*: the first one on a model that no session knows goes
    through, because it is the first load of a framework, which runs the hooks itself; later ones
    are done in a session of their own, or refused::

        class Model(nn.Module):
            @in_session(on_raw="refuse")
            def load_weights(self, weights): ...

        OtherModel.load_weights = in_session(OtherModel.load_weights)

    Args:
        load_weights: the method.
        on_raw: ``"session"``, where each call must bring everything that the scope promises; or
            ``"refuse"``.
        framework: returns what a model belongs to; for models that no session has loaded.
        options: of :class:`WeightLoadSession`.

    Raises:
        UsageError: ``on_raw`` is something else; or, by the method, a raw call is refused.
        ModelBusyError: by the method: another session owns the model, or a part of it.
        WeightLoadError: by the method: as a session does.
    """
    if on_raw not in ("session", "refuse"):
        raise UsageError(f"on_raw is 'session' or 'refuse', found {on_raw!r}.")
    if load_weights is None:
        return functools.partial(in_session, on_raw=on_raw, framework=framework, **options)
    method = load_weights

    @functools.wraps(method)
    def guarded(self: Any, weights: Any, *args: Any, **kwargs: Any) -> Any:
        owner = owner_of(self)
        if owner is not None and owner is current_session():
            return method(self, weights, *args, **kwargs)
        session = open_session(self)
        if session is not None:
            return session.load(weights)
        if owner is not None:
            raise ModelBusyError(
                f"Session {owner.id} owns this model as a part of another one; give the weights "
                f"to that session's load().",
                owner=owner.id,
            )
        known = record_of(self)
        if (known is None or known.framework is None) and self not in _first:
            result = method(self, weights, *args, **kwargs)
            _first.add(self)
            return result
        if on_raw == "refuse":
            raise UsageError(
                f"{type(self).__name__}.load_weights was called outside of a session. What hooks "
                f"have processed would be overwritten in the wrong layout; open a session with "
                f"weightload.WeightLoadSession(model), or weightload.start_reload(model)."
            )
        made = framework(self) if framework is not None and known is None else None
        with WeightLoadSession(self, framework=made, **options) as session:
            if isinstance(weights, Collection):
                weights = list(pairs_of(weights))
                session.check(dict(weights), complete=session.scope.is_full)
            session.load(weights)
        return None

    return guarded
