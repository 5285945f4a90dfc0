"""Decides whether a session uses plans: what the caller says, else the environment."""

from __future__ import annotations

import os
import random

from weightload.errors import UsageError

__all__ = ["MODE", "SEED", "coins", "reseed", "uses_plans"]

MODE = "WEIGHTLOAD_PLANS"
"""The variable that says what sessions do which were not told: ``on``, ``off`` or ``random``."""
SEED = "WEIGHTLOAD_PLANS_SEED"
"""The variable with the number that makes a run with ``random`` come out the same again."""

coins = random.Random(os.environ.get(SEED))
"""What is tossed for each session under ``random``."""


def uses_plans(chosen: bool | None) -> bool:
    """Return whether a session uses plans.

    Args:
        chosen: what its caller says, ``None`` for nothing.

    Raises:
        UsageError: it is neither of them, or the environment says what nobody knows.
    """
    if isinstance(chosen, bool):
        return chosen
    if chosen is not None:
        raise UsageError(f"plans is True, False or None, found {chosen!r}.")
    mode = os.environ.get(MODE, "on")
    if mode not in ("on", "off", "random"):
        raise UsageError(f"The variable {MODE} is 'on', 'off' or 'random', found {mode!r}.")
    return mode == "on" or (mode == "random" and coins.random() < 0.5)


def reseed(seed: str) -> None:
    """Start the tosses anew, so that those of one test do not depend on other tests."""
    coins.seed(seed)
