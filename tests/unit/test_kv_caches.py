"""What is not finite in a cache of keys and values outlives the weights that made it.

Masked positions are multiplied by zero, and zero times NaN is NaN: one block that an engine has
used under bad weights spoils answers under good ones.
"""

import pytest
import torch

from weightload.vllm import caches

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
EIGHT_BITS = {torch.float8_e4m3fn: ["nan"], torch.float8_e5m2: ["nan", "inf", "-inf"]}
CASES = [(kind, bad) for kind in FLOATS for bad in ("nan", "inf", "-inf")]
CASES += [(kind, bad) for kind, bads in EIGHT_BITS.items() for bad in bads]


@pytest.mark.parametrize(("kind", "bad"), CASES, ids=str)
@pytest.mark.parametrize("place", [0, 17, -1])
def test_a_value_that_is_not_finite_becomes_zero_and_all_others_stay(kind, bad, place, monkeypatch):
    monkeypatch.setattr(caches, "_CHUNK_BYTES", 64)  # many parts
    right = torch.linspace(-5, 5, 2 * 6 * 4).view(2, 6, 4).to(kind)
    cache = right.clone()
    cache.view(-1)[place] = float(bad)
    right.view(-1)[place] = 0
    assert caches.clean(cache) is True
    assert torch.equal(cache.float(), right.float())


@pytest.mark.parametrize("kind", [*FLOATS, *EIGHT_BITS], ids=str)
def test_finite_values_stay_as_they_are(kind):
    """Down to the sign of zero and the largest number that there is."""
    top = torch.finfo(kind).max
    cache = torch.tensor([0.0, -0.0, top, -top, 1.0], dtype=torch.float64).to(kind)
    before = cache.clone()
    assert caches.clean(cache) is False
    assert torch.equal(cache.view(torch.uint8), before.view(torch.uint8))


def test_a_cache_that_is_a_view_is_cleaned_where_it_is():
    whole = torch.full((4, 6), float("nan"))
    assert caches.clean(whole.t()[1:3]) is True
    assert torch.equal(whole[:, 1:3], torch.zeros(4, 2))
    assert whole[:, 0].isnan().all()
    assert whole[:, 3:].isnan().all()


@pytest.mark.parametrize(
    "cache", [torch.zeros(3, dtype=torch.uint8), torch.empty(0), torch.empty(2, 0)], ids=repr
)
def test_a_cache_without_floats_is_left_alone(cache):
    assert caches.clean(cache) is False


@pytest.mark.parametrize("channel", [0, 3])
@pytest.mark.parametrize(
    "shape",
    [(2, 5, 4, 2, 4), (5, 2, 4, 4), (2, 5, 2, 4, 3)],
    ids=["heads between", "as many channels as tokens", "heads first"],
)
def test_the_first_tokens_of_blocks_show_what_weights_spoiled(shape, channel):
    """Bad weights spoil one channel of every token: the tokens are the dimension of size 4. Where
    channels are as many, both dimensions are looked at."""
    right = torch.randn(shape)
    cache = right.clone()
    cache[..., min(channel, shape[-1] - 1)] = float("nan")
    assert caches.clean(cache, block_size=4) is True
    assert cache.isfinite().all()
    cache = right.clone()
    assert caches.clean(cache, block_size=4) is False
    assert torch.equal(cache, right)


def test_a_cache_whose_blocks_are_not_known_is_read_whole():
    cache = torch.zeros(6, 5)
    cache[3, 4] = float("inf")
    assert caches.clean(cache, block_size=16) is True
    assert cache.isfinite().all()
