"""Settings that all tests share."""

import os

import pytest
import torch
from hypothesis import HealthCheck, settings

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


@pytest.fixture(autouse=True)
def _no_session_is_left():
    """No test may leave a session behind as the current one."""
    from weightload import current_session

    yield
    assert current_session() is None
