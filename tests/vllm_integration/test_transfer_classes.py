"""Which engines a session can drive, what their options may be, and what a source sends; no engine runs."""

import pytest
import torch
from torch import nn

pytest.importorskip("vllm")
pytestmark = pytest.mark.vllm


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("bias", torch.zeros(3))
        self.register_buffer("cache", torch.zeros(5), persistent=False)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(4, 3)
        self.norm = Norm()
        self.head = nn.Linear(3, 4, bias=False)
        self.head.weight = self.embedding.weight


def test_a_source_sends_the_buffers_of_a_checkpoint_and_each_tensor_once():
    """vLLM's own source sends parameters only: an engine would keep the buffers that it had."""
    from weightload.vllm.transfer import StateSource

    model = Tied()
    source = StateSource(model)
    sent = dict(source)
    assert list(sent) == ["embedding.weight", "norm.weight", "norm.bias"]
    assert [(one.name, one.dtype, one.shape) for one in source.metadata()] == [
        (name, tensor.dtype, tuple(tensor.shape)) for name, tensor in sent.items()
    ]
    assert sent["norm.bias"].data_ptr() == model.norm.bias.data_ptr()
    assert list(dict(source)) == list(sent), "it can be read again"


def engine_class(module, name):
    import importlib

    home = importlib.import_module(f"vllm.distributed.weight_transfer.{module}")
    return getattr(home, name)


@pytest.mark.parametrize(
    ("module", "name", "driven"),
    [
        ("ipc_engine", "IPCWeightTransferEngine", True),
        ("nccl_engine", "NCCLWeightTransferEngine", True),
        ("sparse_nccl_engine", "SparseNCCLWeightTransferEngine", False),
        ("sharded_rdt_engine", "ShardedRDTWeightTransferEngine", False),
        ("m2n_engine", "M2NWeightTransferEngine", False),
    ],
)
def test_engines_that_write_past_the_loaders_are_refused(module, name, driven):
    from weightload.vllm.compat import why_not_through_sessions
    from weightload.vllm.transfer import SessionDriven, session_driven

    try:
        cls = engine_class(module, name)
    except ImportError as error:
        pytest.skip(str(error))
    mine = session_driven(cls)
    assert issubclass(mine, (SessionDriven, cls))
    assert session_driven(mine) is mine
    reason = why_not_through_sessions(mine, SessionDriven)
    assert reason is None if driven else name in reason


def test_the_engines_are_registered_once_however_often_it_is_asked():
    from vllm.distributed.weight_transfer.factory import (
        WeightTransferEngineFactory,
        WeightTransferTrainerFactory,
    )

    from weightload.vllm import transfer

    transfer.register()
    transfer.register()
    for backend in ("file", "gloo", "ipc", "nccl", "shm"):
        for factory in (WeightTransferEngineFactory, WeightTransferTrainerFactory):
            with pytest.raises(ValueError, match="already registered"):
                factory.register_engine(f"weightload_{backend}", object)


class Wire:
    """What a third party's engine has; it writes down what it was told."""

    def __init__(self):
        self.told = None

    def parse_init_info(self, init_dict):
        self.told = init_dict
        return init_dict


@pytest.mark.parametrize(
    ("options", "said"),
    [({"commit": "now"}, "'stream' or 'atomic', found 'now'"), ({"deadline": 0}, "found 0")],
)
def test_the_sessions_options_are_taken_out_and_checked(options, said):
    from weightload import UsageError
    from weightload.vllm.transfer import session_driven

    engine = session_driven(Wire)()
    engine.parse_init_info({"port": 1, "commit": "atomic", "deadline": 5})
    assert engine.told == {"port": 1}
    with pytest.raises(UsageError, match=said):
        engine.parse_init_info(options)


def test_a_bucket_has_room_for_whole_lines_whatever_is_asked():
    from weightload.vllm.transfer import ShmTrainerInitInfo

    assert ShmTrainerInitInfo(rank=0, bucket_bytes=1).bucket_bytes == 64
    assert ShmTrainerInitInfo(rank=0, bucket_bytes=1 << 20).bucket_bytes == 1 << 20
    assert ShmTrainerInitInfo(rank=1).is_sender is False
