"""Makes sessions of calls of a model's ``load_weights`` that come from outside of any, or refuses them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from typing import Any, Literal
from weakref import WeakSet

from torch import nn

from weightload.errors import ModelBusyError, UnclassifiedModuleError, UsageError, name_some
from weightload.framework import Framework
from weightload.ownership import current_session, open_session, owner_of
from weightload.record import record_of
from weightload.session import WeightLoadSession
from weightload.sources import pairs_of, unpack

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

    The method returns what it returned before where a call goes through, and ``None`` where a
    session loads.

    Args:
        load_weights: the method.
        on_raw: ``"session"``, where each call must bring everything that the scope promises; or
            ``"refuse"``.
        framework: called with a model that no session has loaded, returns what it belongs to. One
            that learns by :meth:`Framework.adopt` what hooks did without a session is needed for
            models that have hooks; for vLLM's models ``weightload.vllm.worker.framework_for``
            makes it.
        options: of :class:`WeightLoadSession`.

    Raises:
        UsageError: an argument is of no use; or, by the method, a raw call is refused, because of
            ``on_raw``, of arguments beside the weights, or of hooks of which nobody knows what
            they did.
        ModelBusyError: by the method: another session owns the model, or a part of it.
        WeightLoadError: by the method: as a session does.
    """
    if on_raw not in ("session", "refuse"):
        raise UsageError(f"on_raw is 'session' or 'refuse', found {on_raw!r}.")
    if framework is not None and not callable(framework):
        raise UsageError(
            f"framework is called with a model and returns what it belongs to, found "
            f"{type(framework).__name__}."
        )
    WeightLoadSession(nn.Module(), **options)  # refuses wrong options now, not at a later call
    if load_weights is None:
        return functools.partial(in_session, on_raw=on_raw, framework=framework, **options)
    if not callable(load_weights):
        raise UsageError(
            f"in_session decorates a method load_weights, found {type(load_weights).__name__}."
        )
    method = load_weights

    @functools.wraps(method)
    def guarded(self: Any, weights: Any, *args: Any, **kwargs: Any) -> Any:
        owner = owner_of(self)
        if owner is not None and owner is current_session():
            return method(self, weights, *args, **kwargs)
        session = open_session(self)
        if session is None and owner is not None:
            raise ModelBusyError(
                f"Session {owner.id} owns this model as a part of another one; give the weights "
                f"to that session's load().",
                owner=owner.id,
            )
        known = record_of(self)
        new = known is None or known.framework is None
        if session is None and new and self not in _first:
            result = method(self, weights, *args, **kwargs)
            _first.add(self)
            return result
        if session is None and on_raw == "refuse":
            raise UsageError(
                f"{type(self).__name__}.load_weights was called outside of a session. What hooks "
                f"have processed would be overwritten in the wrong layout; open a session with "
                f"weightload.WeightLoadSession(model), or weightload.start_reload(model)."
            )
        if args or kwargs:
            raise UsageError(
                f"{type(self).__name__}.load_weights was called with arguments beside the weights, "
                f"which a session's load() cannot pass on. Call it from inside a session, by "
                f"load_through()."
            )
        if session is not None:
            session.load(weights)
            return
        made = framework(self) if new and framework is not None else None
        if new:
            _check_hooks(self, Framework() if made is None else made)
        weights = pairs_of(weights)
        with WeightLoadSession(self, framework=made, **options) as session:
            if isinstance(weights, Collection):
                weights = [unpack(pair) for pair in weights]
                session.check(dict(weights), complete=session.scope.is_full)
            session.load(weights)

    return guarded


def _check_hooks(model: nn.Module, framework: Framework) -> None:
    """Refuse a model whose hooks ran without a session, if nobody can say what they did.

    A session would take what they left for what loaders expect, and run them a second time.
    """
    if type(framework).adopt is not Framework.adopt:
        return
    hooked = [
        name or "the whole model"
        for name, module in model.named_modules()
        if _has_hook(framework, module, name)
        or (module is model and framework.model_rule(model) is not None)
    ]
    if hooked:
        raise UsageError(
            f"{type(model).__name__} was loaded without a session, and what the hooks of "
            f"{name_some(hooked)} did to it is not known. Make its first load a session, or pass "
            f"in_session a framework= that can adopt it, such as "
            f"weightload.vllm.worker.framework_for."
        )


def _has_hook(framework: Framework, module: nn.Module, name: str) -> bool:
    try:
        return bool(framework.registry.rules_for(module, name))
    except UnclassifiedModuleError:
        return True
