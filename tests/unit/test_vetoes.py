"""A load of a vLLM model does not begin while its weights are away, or its experts are elsewhere."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from weightload import SessionState, UnsupportedError, WeightLoadSession
from weightload.vllm.vetoes import is_asleep, vetoes_of, was_rearranged


def worker(placement=None, **attributes):
    state = None
    if placement is not None:
        maps = SimpleNamespace(physical_to_logical_map=torch.tensor(placement))
        state = SimpleNamespace(model_states={"model": maps})
    return SimpleNamespace(model_runner=SimpleNamespace(eplb_state=state), **attributes)


@pytest.mark.parametrize(
    ("placement", "moved"),
    [
        ([[0, 1, 2, 3]], False),
        ([[0, 1, 2, 3, 0, 1], [0, 1, 2, 3, 0, 1]], False),  # two redundant experts
        ([[0, 2, 1, 3]], True),
        ([[0, 1, 2, 3, 0, 1], [0, 1, 2, 3, 0, 2]], True),
        ([[3, 1, 2, 0, 0, 1], [0, 1, 2, 3, 0, 1]], True),
    ],
)
def test_experts_are_where_they_were_loaded_or_a_load_is_refused(placement, moved):
    asked = worker(placement)
    assert was_rearranged(asked.model_runner.eplb_state) is moved
    reasons = [reason for veto in vetoes_of(asked) if (reason := veto(nn.Linear(1, 1)))]
    assert len(reasons) == moved
    assert all("rearranged" in reason for reason in reasons)


@pytest.mark.parametrize(
    ("attributes", "asleep"),
    [
        ({}, False),
        ({"_sleep_saved_buffers": {}}, False),
        ({"_sleep_saved_buffers": {"buffer": torch.ones(1)}}, True),
        ({"_weightload_asleep": True}, True),
        ({"_weightload_asleep": False}, False),
    ],
)
def test_a_sleeping_engine_is_not_loaded(attributes, asleep):
    asked = worker(**attributes)
    assert is_asleep(asked) is asleep
    session = WeightLoadSession(nn.Linear(1, 1), veto=vetoes_of(asked))
    if asleep:
        with pytest.raises(UnsupportedError, match="asleep"):
            session.prepare()
        assert session.state is SessionState.NEW
    else:
        session.prepare()
        session.abort()
