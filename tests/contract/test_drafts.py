"""A model and its draft are loaded from one stream: both are what fresh ones would be, or neither.

The damage shown: a draft that goes on with the old embedding, or reads it twice; a target that is
committed when its draft fails; units that both loaders fill, processed when only one has.
"""

import attrs
import pytest
import torch
from torch import nn

from weightload import (
    Draft,
    IncompleteLoadError,
    ModelBusyError,
    ModelPoisonedError,
    ProcessingError,
    Scope,
    UnexpectedWeightError,
    UsageError,
    WeightLoadSession,
    poison_of,
    require_usable,
    weights_version,
)
from weightload.testing import (
    CollectingModel,
    Kept,
    LoadingModel,
    ToyModel,
    check_equal,
    layers,
    loading,
    make_state,
    toy_framework,
)

SHARED = {
    "plain": layers.Linear,
    "repacked": layers.RepackedLinear,
    "loaded by a loader that writes twice": loading.ComposedLoaderLinear,
    "fused": lambda: loading.FusedLinear(2),
}


class Guest:
    """Takes what begins with ``mtp.`` and the names of what it shares; ignores all other names."""

    def load_weights(self, weights):
        for name, tensor in weights:
            if name.startswith("mtp."):
                self.store(name.removeprefix("mtp."), tensor)
            elif name.startswith("layers.0."):
                self.store(name, tensor)


class GuestDraft(Guest, LoadingModel):
    """A draft that is offered everything."""


class Host:
    """Takes everything but what begins with ``mtp.``."""

    def load_weights(self, weights):
        super().load_weights((n, t) for n, t in weights if not n.startswith("mtp."))


class HostModel(Host, LoadingModel):
    """Loads tensor by tensor."""


class CollectingHost(Host, CollectingModel):
    """Collects all tensors before it loads."""


@attrs.frozen
class Pair:
    """Makes both as one toy, so that the oracle can build fresh ones.

    Attributes:
        shared: makes the layer that both have, as their first.
        host: the target's class.
    """

    shared: object
    host: type = HostModel

    def __call__(self):
        return Both(self.shared(), self.host)


class Both(ToyModel):
    """A target and its draft; the draft has the target's first layer as its own first."""

    def __init__(self, shared, host):
        super().__init__()
        self.target = host(shared, layers.RepackedLinear(), loading.FusedLinear())
        self.draft = GuestDraft(shared, layers.RepackedLinear(), layers.KernelLinear())

    def forward(self, x):
        return self.target(x) + self.draft(torch.tanh(x))

    def load_weights(self, weights):
        items = list(weights)
        self.target.load_weights(items)
        # The oracle: what both take was filled already, and a second time it would be the same.
        self.draft.load_weights([pair for pair in items if pair[0].startswith("mtp.")])

    def checkpoint(self):
        own = {
            f"mtp.{name}": shape
            for name, shape in self.draft.checkpoint().items()
            if not name.startswith("layers.0.")
        }
        return {**self.target.checkpoint(), **own}


class Desk:
    """Both models, loaded once, with what a test asks."""

    def __init__(self, pair):
        self.pair = pair
        self.both = pair()
        self.framework = toy_framework()
        self.load(1)
        self.kept = Kept.of(self.both)

    def session(self, **options):
        options.setdefault("framework", self.framework)
        options.setdefault("drafts", [self.both.draft])
        return WeightLoadSession(self.both.target, **options)

    def state(self, seed):
        return make_state(self.pair, seed)

    def load(self, seed, **options):
        with self.session(version=seed, **options) as session:
            session.load(self.state(seed))
        return session

    def check(self, seed):
        check_equal(self.both, self.pair, self.state(seed))
        self.kept.check(self.both)


def as_mapping(session, state):
    session.load(state)


def reversed_chunks(session, state):
    items = list(reversed(state.items()))
    for start in range(0, len(items), 3):
        session.load(items[start : start + 3])


def one_buffer(session, state):
    """What the target collects and what the draft takes at once come through one buffer."""
    buffer = torch.empty(max(tensor.numel() for tensor in state.values()))

    def source():
        for name, tensor in state.items():
            view = buffer[: tensor.numel()].view(tensor.shape)
            view.copy_(tensor)
            yield name, view
            buffer.fill_(float("nan"))

    session.load(source(), transport=buffer)


def through_the_target(session, state):
    """A transport that knows the target's ``load_weights`` and nothing of a draft."""
    session.load_through(lambda: session.model.load_weights(iter(state.items())), exact=True)


WAYS = (as_mapping, reversed_chunks, one_buffer, through_the_target)


@pytest.mark.parametrize("commit", ["stream", "atomic"])
@pytest.mark.parametrize("host", [HostModel, CollectingHost])
@pytest.mark.parametrize("shared", sorted(SHARED))
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_one_stream_gives_both_what_fresh_ones_have(way, shared, host, commit):
    desk = Desk(Pair(SHARED[shared], host))
    for seed in (2, 1):
        desk.framework.calls.clear()
        with desk.session(version=seed, commit=commit, verify="full") as session:
            way(session, desk.state(seed))
        desk.check(seed)
        assert weights_version(desk.both.target) == weights_version(desk.both.draft) == seed


def test_what_both_have_is_written_once():
    desk = Desk(Pair(layers.Linear))
    session = desk.load(2)
    sizes = [tensor.numel() * 4 for tensor in desk.state(2).values()]
    assert session.receipt.bytes_written == sum(sizes)


@pytest.mark.parametrize(("commit", "before"), [("stream", 2), ("atomic", 3)])
def test_a_draft_that_fails_fails_both(commit, before):
    """A hook of the draft raises: an atomic load has written nothing, a stream has mixed both."""
    desk = Desk(Pair(layers.RepackedLinear))
    desk.framework.fail_hook(before)
    session = desk.session(commit=commit)
    with pytest.raises(ProcessingError) as caught, session:
        session.load(desk.state(2))
    assert caught.value.facts["module"].startswith("draft0.")
    if commit == "atomic":
        desk.check(1)
    for model in (desk.both.target, desk.both.draft):
        assert (poison_of(model) is None) == (commit == "atomic") == caught.value.model_intact
        if commit == "stream":
            with pytest.raises(ModelPoisonedError):
                require_usable(model)
    desk.load(2)
    desk.check(2)


def test_a_tensor_that_the_draft_lacks_is_missed():
    desk = Desk(Pair(layers.Linear))
    state = desk.state(2)
    name = next(name for name in state if name.startswith("mtp."))
    del state[name]
    session = desk.session(commit="atomic")
    with pytest.raises(IncompleteLoadError, match="draft0") as caught, session:
        session.load(state)
    assert caught.value.model_intact
    desk.check(1)


def test_a_name_that_nobody_takes_is_refused():
    desk = Desk(Pair(layers.Linear))
    with pytest.raises(UnexpectedWeightError, match="stranger"), desk.session() as session:
        session.load({**desk.state(2), "stranger": torch.ones(2)})
    desk.check(1)


def test_each_can_be_loaded_alone_afterwards():
    """What came for the draft alone is not missed by the target, and the other way round."""
    desk = Desk(Pair(layers.Linear))
    state = desk.state(2)
    target = {name: value for name, value in state.items() if not name.startswith("mtp.")}
    with WeightLoadSession(desk.both.target, version=2) as session:
        session.load(target)
    own = {name: value for name, value in state.items() if name not in target}
    shared = {name: value for name, value in state.items() if name.startswith("layers.0.")}
    with WeightLoadSession(desk.both.draft, version=2) as session:
        session.load({**own, **shared})
    desk.check(2)
    assert weights_version(desk.both.draft) == 2


def test_a_part_of_both_can_be_loaded():
    desk = Desk(Pair(layers.Linear))
    state, before = desk.state(2), desk.state(1)
    names = ["mtp.layers.2.weight", "layers.0.weight"]
    with desk.session(scope=Scope.only(names)) as session:
        session.load({name: state[name] for name in names})
    check_equal(desk.both, desk.pair, {**before, **{name: state[name] for name in names}})


def test_sessions_of_their_own_need_models_that_share_nothing():
    desk = Desk(Pair(layers.Linear))
    other = LoadingModel(layers.Linear())
    session = desk.session(drafts=[])
    session.prepare()
    with pytest.raises(ModelBusyError):
        WeightLoadSession(desk.both.draft).prepare()
    state = make_state(lambda: other, 5)
    with WeightLoadSession(other, framework=desk.framework) as apart:
        apart.load(state)
    session.load({n: t for n, t in desk.state(2).items() if not n.startswith("mtp.")})
    session.finish()
    check_equal(other, lambda: LoadingModel(layers.Linear()), state)


class Eagle(LoadingModel):
    """Has the names of a model of its own, which are also names of the target."""


def test_a_prefix_says_which_tensors_are_for_the_draft():
    """Both have ``layers.1.weight``; only the prefix tells them apart."""
    framework = toy_framework()

    def make():
        shared = layers.RepackedLinear()
        return (
            LoadingModel(shared, layers.RepackedLinear()),
            Eagle(shared, layers.RepackedLinear(), layers.KernelLinear()),
        )

    target, draft = make()
    want_target, want_draft = make()
    for seed in (1, 2, 3):
        state = make_state(lambda: make()[0], seed)
        own = {
            f"eagle.{name}": tensor
            for name, tensor in make_state(lambda: make()[1], seed + 10).items()
            if not name.startswith("layers.0.")
        }
        drafts = [Draft(model=draft, prefix="eagle.")]
        with WeightLoadSession(target, framework=framework, drafts=drafts) as session:
            session.load({**own, **state})
    want_target, want_draft = make()
    want_target.load_weights(state.items())
    want_draft.load_weights((n.removeprefix("eagle."), t) for n, t in own.items())
    for module in {*want_target.modules(), *want_draft.modules()}:
        method = getattr(module, "quant_method", None)
        if method is not None:
            method.process_weights_after_loading(module)
        elif hasattr(module, "process_weights_after_loading"):
            module.process_weights_after_loading()
    x = target.example()
    assert torch.equal(target(x), want_target(x))
    assert torch.equal(draft(x), want_draft(x))


def test_two_drafts_are_loaded_with_one_target():
    framework = toy_framework()
    target = LoadingModel(layers.Linear())
    drafts = [LoadingModel(layers.RepackedLinear()), LoadingModel(layers.KernelLinear())]
    for seed in (1, 2):
        states = [
            make_state(lambda: ToyModel(layers.Linear()), seed + number) for number in range(3)
        ]
        names = {f"d{number}.{n}": t for number in (0, 1) for n, t in states[number].items()}
        made = [Draft(model=draft, prefix=f"d{n}.") for n, draft in enumerate(drafts)]
        with WeightLoadSession(target, framework=framework, drafts=made) as session:
            session.load({**names, **states[2]})
    check_equal(target, lambda: LoadingModel(layers.Linear()), states[2])
    check_equal(drafts[0], lambda: LoadingModel(layers.RepackedLinear()), states[0])
    check_equal(drafts[1], lambda: LoadingModel(layers.KernelLinear()), states[1])


TARGET, DRAFT = LoadingModel(layers.Linear()), LoadingModel(layers.Linear())


@pytest.mark.parametrize(
    "wrong",
    [
        ["draft"],
        "draft",
        None,
        5,
        DRAFT,
        Draft(model=DRAFT),
        nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)),
        nn.ModuleList([DRAFT]),
        [None],
        [TARGET],
        [Draft(model=TARGET, prefix="draft.")],
        [DRAFT, DRAFT],
        [DRAFT, Draft(model=DRAFT, prefix="draft.")],
        [Draft(model=DRAFT, prefix=5)],
        [Draft(model=DRAFT, prefix=None)],
        [Draft(model=None)],
        [Draft(model=DRAFT, framework=5)],
    ],
)
def test_drafts_are_a_list_of_other_modules_each_once(wrong):
    """The children of a module that is given as the list would be taken for drafts, or a draft for
    its own target, which all its tensors then reach twice."""
    with pytest.raises(UsageError, match=r"[Dd]raft"):
        WeightLoadSession(TARGET, drafts=wrong)
