"""verify= compares what is live with what was sent, by another way than the one it came."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weightload import UsageError, VerificationError, WeightLoadSession, bake, poison_of
from weightload import digest as digests
from weightload.digest import digest
from weightload.testing import TOYS, Bench, LoadingModel, layers
from weightload.verifying import _WINDOW, SAMPLE, Verification


@pytest.mark.parametrize("commit", ["stream", "atomic"])
@pytest.mark.parametrize("toy", TOYS)
def test_a_right_load_passes(toy, commit):
    bench = Bench(TOYS[toy])
    session = bench.reload(bench.state(2), verify="full", commit=commit)
    verified = session.receipt.verified
    assert verified["mode"] == "full"
    assert verified["tensors"] > 0
    assert verified["nbytes"] > 0
    bench.check_recovers()


def test_what_was_written_in_place_is_compared_with_what_was_sent():
    """Somebody writes to a live tensor behind the session, after its loader."""
    bench = Bench(TOYS["plain"])
    session = bench.open(verify="full")
    session.load(bench.state(2))
    bench.model.layers[1].weight.data[2, 3] += 1
    with pytest.raises(VerificationError, match=r"layers\.1\.weight"):
        session.finish()
    assert poison_of(bench.model) is not None
    bench.serves = None
    bench.reload(bench.state(3), verify="full")


def test_values_that_changed_places_are_seen():
    bench = Bench(TOYS["plain"])
    session = bench.open(verify="full")
    session.load(bench.state(2))
    weight = bench.model.layers[0].weight.data
    weight.copy_(weight.flip(0).clone())
    with pytest.raises(VerificationError, match=r"layers\.0\.weight"):
        session.finish()


@pytest.mark.parametrize("commit", ["stream", "atomic"])
def test_a_hook_that_does_not_give_the_same_twice_is_found(commit):
    bench = Bench(TOYS["repacked"])
    bench.framework.calls.clear()
    passes = []
    original = type(bench.model.layers[0].quant_method).process_weights_after_loading

    def drifting(method, layer):
        passes.append(layer)
        layer.weight.data.mul_(len(passes))
        original(method, layer)

    cls = type(bench.model.layers[0].quant_method)
    cls.process_weights_after_loading = drifting
    try:
        with (
            pytest.raises(VerificationError, match=r"layers\.0|layers\.2"),
            bench.session(verify="full", commit=commit) as session,
        ):
            session.load(bench.state(2))
    finally:
        cls.process_weights_after_loading = original
    bench.serves = None
    bench.reload(bench.state(3), verify="full")


def test_a_sample_is_small_and_another_one_in_each_version():
    names = [f"layers.{index}.weight" for index in range(40 * SAMPLE)]
    samples = []
    for salt in ("1", "2"):
        verification = Verification(mode="sampled", salt=salt)
        samples.append({name for name in names if verification.wants(name)})
    for sample in samples:
        assert 20 < len(sample) < 60
    assert samples[0] != samples[1]
    verification = Verification(mode="full", salt="")
    assert all(verification.wants(name) for name in names)


@pytest.mark.parametrize("toy", ["plain", "repacked"])
def test_a_sample_is_never_empty(toy):
    bench = Bench(TOYS[toy])
    for seed in (2, 3, 4):
        verified = bench.reload(bench.state(seed), verify="sampled", version=seed).receipt.verified
        assert verified["tensors"] > 0
        assert not verified["digest"].endswith("-0")


def test_two_ranks_that_got_the_same_have_the_same_digest_and_others_have_not():
    digests = []
    for seed in (2, 2, 3):
        bench = Bench(TOYS["repacked"])
        session = bench.open(verify="full", version=7)
        session.load(bench.state(seed))
        digests.append(session.seal()["digest"])
        session.finish()
        assert session.receipt.verified["digest"] == digests[-1]
    assert digests[0] == digests[1] != digests[2]


def test_a_replay_says_that_it_has_no_digest_of_what_came():
    """Ranks fetch other parts of one source each, so that there is nothing that they could compare;
    a digest that is the same for all data would say that they agree."""
    bench = Bench(TOYS["repacked"])
    plan = bake(bench.model, bench.state(2))
    for seed in (2, 3):
        session = bench.open(verify="full", version=seed)
        session.replay(plan, bench.state(seed))
        assert session.seal() == {"names": len(plan.sources), "digest": None}
        session.finish()
        verified = session.receipt.verified
        assert verified["digest"] is None
        assert verified["tensors"] > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.bool])
@pytest.mark.parametrize("size", [1, 7, 8, 64, 1000, 1001])
def test_a_digest_changes_with_every_byte_and_with_every_place(dtype, size):
    generator = torch.Generator().manual_seed(size)
    values = torch.randn(size, generator=generator)
    tensor = values.to(dtype) if dtype is not torch.bool else values > 0
    mark = digest(tensor)
    assert mark == digest(tensor.clone())
    raw = tensor.view(torch.uint8)
    for index in {0, size // 2, raw.numel() - 1}:
        raw[index] ^= 1
        assert digest(tensor) != mark
        raw[index] ^= 1
    moved = tensor.roll(1)
    if not torch.equal(moved, tensor):
        assert digest(moved) != mark


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_a_digest_of_several_parts_sees_what_changed_places_between_them(rows, monkeypatch):
    """Large tensors are looked at in parts, each of some rows of 128 words."""
    monkeypatch.setattr(digests, "_AT_ONCE", rows * 128)
    words = torch.randint(1 << 40, (3000,), generator=torch.Generator().manual_seed(5))
    mark = digest(words)
    for left, right in ((0, 128), (0, rows * 128), (5, 2999), (rows * 128 - 1, rows * 128)):
        moved = words.clone()
        moved[[left, right]] = words[[right, left]]
        assert digest(moved) != mark
    parts = words[: 4 * rows * 128].view(4, -1)
    if rows * 128 * 4 < 3000:
        assert digest(torch.cat((parts.flip(0).flatten(), words[4 * rows * 128 :]))) != mark


def test_a_digest_sees_a_sign_that_changed_in_any_place():
    """The highest bit of a word: twice an odd multiple of it is nothing in 64 bits, so that what
    it does to two sums must not be added as it is."""
    tensor = torch.randn(512, generator=torch.Generator().manual_seed(3)).bfloat16()
    mark = digest(tensor)
    unseen = []
    for index in range(tensor.numel()):
        tensor[index] = -tensor[index]
        if digest(tensor) == mark:
            unseen.append(index)
        tensor[index] = -tensor[index]
    assert unseen == []


def test_a_digest_sees_two_words_that_differ_in_one_high_bit_and_changed_places():
    words = torch.randint(1 << 40, (64,), generator=torch.Generator().manual_seed(4))
    for left, right in ((0, 1), (0, 8), (3, 60), (8, 24)):
        words[right] = words[left] ^ -(1 << 63)
        mark = digest(words)
        words[[left, right]] = words[[right, left]]
        assert digest(words) != mark
        words[[left, right]] = words[[right, left]]


def test_a_digest_does_not_depend_on_how_a_tensor_lies_in_memory():
    tensor = torch.arange(60.0).view(6, 10)
    assert digest(tensor.t()) == digest(tensor.t().contiguous())
    assert digest(torch.arange(61.0)[1:]) == digest(torch.arange(61.0)[1:].clone())
    assert digest(torch.empty(0)) == 0


def test_a_mode_that_does_not_exist_is_refused():
    with pytest.raises(UsageError, match="'sampled' or 'full'"):
        Bench(TOYS["plain"]).session(verify="some")


def _wide(rows):
    """A model whose first weight is worth more than what a sample looks at."""

    class Wide(layers.Linear):
        def __init__(self):
            super().__init__()
            self.weight = layers.parameter(rows, layers.WIDTH)

        def forward(self, x):
            return x @ self.weight[: layers.WIDTH].t()

    return lambda: LoadingModel(Wide(), layers.Linear(), layers.RepackedLinear())


@pytest.mark.parametrize("plans", [False, True])
def test_a_sample_of_a_large_tensor_sees_what_a_writer_did_to_all_of_it(plans):
    """A part is compared, and not the same in every version; what hits all is found in each."""
    bench = Bench(_wide(100_000))
    for seed in (2, 3):
        bench.reload(bench.state(seed), plans=plans, verify="sampled", version=seed)
    session = bench.open(plans=plans, verify="sampled", version=4)
    session.load(bench.state(4))
    with torch.no_grad():
        bench.model.layers[0].weight += 1
    with pytest.raises(VerificationError, match=r"layers\.0\.weight"):
        session.finish()


def test_what_is_looked_at_does_not_depend_on_the_way():
    """Ranks compare what they got, and one of them may have lost its plan."""
    texts = set()
    for plans in (False, True):
        bench = Bench(TOYS["everything"])
        for seed in (2, 3, 4):
            state = dict(sorted(bench.state(seed).items(), reverse=seed == 4))
            session = bench.reload(state, plans=plans, verify="sampled", version=seed)
        texts.add(session.receipt.verified["digest"])
    assert len(texts) == 1


@given(
    st.lists(st.integers(1, 2000), min_size=1, max_size=4).filter(lambda s: math.prod(s) < 5e6),
    st.integers(),
)
def test_a_window_is_a_part_of_bounded_size(shape, salt):
    tensor = torch.empty(shape)
    window = Verification(mode="sampled", salt=str(salt))._window(tensor)
    assert 0 < window.numel() * 4 <= _WINDOW
    assert window.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
    if tensor.numel() * 4 <= _WINDOW:
        assert window.shape == tensor.shape
    else:
        assert window.numel() * 4 > _WINDOW / 2


class Turning(torch.nn.Module):
    """Its loader turns a square matrix."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(4, 4), requires_grad=False)

    def load_weights(self, weights):
        for _, tensor in weights:
            self.weight.copy_(tensor.t())


@pytest.mark.parametrize("verify", ["sampled", "full"])
def test_what_is_live_is_compared_in_the_order_in_which_it_was_written(verify):
    model = Turning()
    for number in range(1, 6):
        sent = torch.randn(4, 4, generator=torch.Generator().manual_seed(number))
        with WeightLoadSession(model, plans=True, verify=verify, version=number) as session:
            session.load({"weight": sent})
        assert torch.equal(model.weight, sent.t())
        assert session.receipt.verified["tensors"] == 1
