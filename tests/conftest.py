"""Settings that all tests share."""

import os
import random

import pytest
import torch
from hypothesis import HealthCheck, register_random, settings

from weightload import planning

# Toys are small: several threads for one product cost more than they save.
torch.set_num_threads(1)

# One fault at a time: to shrink several takes minutes.
_common = {
    "deadline": None,
    "report_multiple_bugs": False,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large],
}
settings.register_profile("ci", max_examples=60, derandomize=True, **_common)
settings.register_profile("dev", max_examples=30, **_common)
settings.register_profile("long", max_examples=2000, **_common)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_addoption(parser):
    parser.addoption(
        "--plans",
        choices=["on", "off", "random"],
        default=os.environ.get(planning.MODE, "on"),
        help="whether sessions that are not told use plans; random is a coin for each session, "
        f"tossed anew for each test from the number in {planning.SEED}",
    )


def pytest_configure(config):
    os.environ[planning.MODE] = config.getoption("--plans")
    os.environ.setdefault(planning.SEED, str(random.randrange(10**6)))
    register_random(planning.coins)  # or examples come out differently when they are repeated


def pytest_report_header(config):
    return f"plans: {config.getoption('--plans')}, {planning.SEED}={os.environ[planning.SEED]}"


@pytest.fixture(autouse=True)
def _own_coins(request, monkeypatch):
    """Toss the coins of a test by its name, and of what it starts as well."""
    if request.node.get_closest_marker("long_way"):
        monkeypatch.setenv(planning.MODE, "off")
    planning.reseed(f"{os.environ[planning.SEED]} {request.node.nodeid}")


@pytest.fixture(autouse=True)
def _no_session_is_left():
    """No test may leave a session behind as the current one."""
    from weightload import current_session

    yield
    assert current_session() is None
