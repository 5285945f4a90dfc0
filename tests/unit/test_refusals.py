"""Each row of the table of refusals is refused, in the words of the table, and nothing is written."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from weightload import UnsupportedError, WeightLoadSession
from weightload.refusals import REFUSALS, why_refused
from weightload.testing import TOYS, Bench, ToyModel, layers, sharing
from weightload.vllm.vetoes import vetoes_of


def worker(model, draft=None, placement=None, **attributes):
    state = None
    if placement is not None:
        maps = SimpleNamespace(physical_to_logical_map=torch.tensor(placement))
        state = SimpleNamespace(model_states={"model": maps})
    return SimpleNamespace(
        get_model=lambda: model,
        get_draft_model=lambda: draft,
        model_runner=SimpleNamespace(eplb_state=state),
        **attributes,
    )


def asleep():
    bench = Bench(TOYS["fused"])
    vetoes = vetoes_of(worker(bench.model, _weightload_asleep=True))
    with refused("asleep"):
        bench.session(veto=vetoes).prepare()
    return bench


def rearranged():
    bench = Bench(TOYS["fused"])
    with refused("rearranged"):
        bench.session(veto=vetoes_of(worker(bench.model, placement=[[1, 0, 2]]))).prepare()
    return bench


def draft_alone():
    """The shared layer is repacked; a draft that shares a plain layer, or none, is loaded."""
    bench = Bench(TOYS["repacked"])
    packed, plain, _ = bench.model.layers
    for shared, allowed in (([packed], False), ([plain], True), ([], True)):
        draft = ToyModel(*shared, layers.Linear())
        session = WeightLoadSession(
            draft, veto=vetoes_of(worker(bench.model, draft)), framework=bench.framework
        )
        if allowed:
            session.prepare()
            session.abort()
        else:
            with refused("draft alone"):
                session.prepare()
    tied = nn.ModuleList([sharing.PackedHead(packed.weight)])
    with refused("draft alone"):
        WeightLoadSession(tied, veto=vetoes_of(worker(bench.model, tied))).prepare()
    return bench


def kernel_format():
    pytest.importorskip("vllm")
    from weightload.vllm.guarded import guarded

    bench = Bench(TOYS["fused"])

    class Base:
        """Stands for vLLM's worker."""

    class Worker(guarded(Base)):
        rank = 0
        vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(world_size=1))
        weight_transfer_engine = None

        def get_model(self):
            return bench.model

    weights = [("layers.0.weight", torch.zeros(2, 2))]
    with refused("kernel format"):
        Worker().reload_weights(weights, is_checkpoint_format=False)
    return bench


def past_the_loaders():
    """vLLM's engines for sparse patches and for baked scatters, and one that we have never seen."""
    pytest.importorskip("vllm")
    from vllm.distributed.weight_transfer.sharded_rdt_engine import ShardedRDTWeightTransferEngine
    from vllm.distributed.weight_transfer.sparse_nccl_engine import SparseNCCLWeightTransferEngine

    from weightload.vllm import compat
    from weightload.vllm.transfer import SessionDriven, session_driven

    class Unknown:
        def start_weight_update(self):
            """Nothing has to be made ready."""

    for cls in (SparseNCCLWeightTransferEngine, ShardedRDTWeightTransferEngine, Unknown):
        said = compat.why_not_through_sessions(session_driven(cls), SessionDriven)
        assert said == why_refused("past the loaders", cls.__name__)
    return Bench(TOYS["fused"])


TRIALS = {
    "asleep": asleep,
    "rearranged": rearranged,
    "kernel format": kernel_format,
    "past the loaders": past_the_loaders,
    "draft alone": draft_alone,
}


def refused(name):
    import re

    return pytest.raises(UnsupportedError, match=re.escape(why_refused(name)))


@pytest.mark.parametrize("name", sorted(REFUSALS))
def test_each_row_is_refused_and_the_model_goes_on_as_it_was(name):
    bench = TRIALS[name]()
    bench.check_structure()
    bench.check_recovers()


def test_every_row_says_what_to_do_instead():
    for row in REFUSALS.values():
        assert row.why.endswith(".")
        assert row.instead.endswith(".")
