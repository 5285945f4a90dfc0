"""Many small copies on a device take few launches, and each brings its own bytes."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from weightload.batching import Batch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU with CUDA"),
]
COUNT = 4096


def launched(call):
    call()  # what torch loads at a kernel's first use is no launch
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        call()
        torch.cuda.synchronize()
    cuda = torch.autograd.DeviceType.CUDA
    return sum(1 for event in seen.events() if event.device_type == cuda)


@pytest.mark.parametrize("source", [torch.bfloat16, torch.float32])
def test_four_thousand_copies_are_at_most_a_launch_for_each_32(source):
    sources = torch.randn(COUNT, 64, 64, device="cuda").to(source)
    targets = torch.full((COUNT, 64, 64), -1.0, device="cuda", dtype=torch.bfloat16)

    def load():
        batch = Batch()
        for target, one in zip(targets, sources, strict=True):
            batch.add(target, one)
        batch.flush()

    assert launched(load) <= COUNT / 32
    assert torch.equal(targets, sources.to(torch.bfloat16))


def test_a_tensor_of_the_host_goes_at_once_and_pinned_memory_may_change_after_the_stream_is_done():
    batch = Batch()
    for pinned in (False, True):
        source = torch.randn(1 << 20, pin_memory=pinned)
        want, target = source.clone(), torch.zeros(1 << 20, device="cuda")
        batch.add(target, source)
        if pinned:
            torch.cuda.synchronize()
        source.fill_(-1)
        assert len(batch) == 0
        assert torch.equal(target.cpu(), want)
