"""Toy models, what they must compute, and the lifecycle of sessions as a state machine.

weightload is tested with these; so can a framework adapter or an application be. A toy has one
behaviour that makes a reload go wrong, :func:`expected` says what it must compute, worked out
without weightload, and :class:`Kept` says whether everything is where it was::

    model, framework = TOYS["tied"](), toy_framework()
    state = make_state(TOYS["tied"], seed=1)
    with WeightLoadSession(model, framework=framework) as session:
        session.load(state)
    check_equal(model, TOYS["tied"], state)

``SessionMachine`` needs hypothesis and is imported when it is asked for.
"""

from typing import Any

from weightload.testing.bench import Bench
from weightload.testing.models import (
    TOYS,
    BareModel,
    CollectingModel,
    LoadingModel,
    TiedModel,
    ToyModel,
    everything,
    make_state,
)
from weightload.testing.oracle import (
    Kept,
    ToyFault,
    ToyFramework,
    check_equal,
    expected,
    fresh,
    identical,
    outputs,
    toy_framework,
)

__all__ = [
    "TOYS",
    "BareModel",
    "Bench",
    "CollectingModel",
    "Kept",
    "LoadingModel",
    "TiedModel",
    "ToyFault",
    "ToyFramework",
    "ToyModel",
    "check_equal",
    "everything",
    "expected",
    "fresh",
    "identical",
    "make_state",
    "outputs",
    "toy_framework",
]


def __getattr__(name: str) -> Any:
    if name == "SessionMachine":
        from weightload.testing.machine import SessionMachine

        return SessionMachine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
