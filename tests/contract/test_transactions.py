"""A load that fails says so, to everybody, and nobody serves what it left half done.

The faults here are those of callers: a flag that is never reset, a version that is published
anyway, a failure that is a return value, a rank that waits for another, a draft that stays old.
"""

import pytest
import torch
from small import COMMITS, Live, Negated, Net, Plain, X, framework_for, number
from torch import nn

from weightload import (
    IncompleteLoadError,
    InvalidTransitionError,
    ModelBusyError,
    ModelPoisonedError,
    Receipt,
    SessionState,
    UnexpectedWeightError,
    WeightLoadError,
    WeightLoadSession,
    WeightMismatchError,
    abort_reload,
    finish_reload,
    open_session,
    poison_of,
    require_usable,
    start_reload,
    weights_version,
)
from weightload.ownership import owner_of
from weightload.testing import identical


@pytest.fixture(params=COMMITS)
def commit(request):
    return request.param


def state(value):
    return {"layers.0.weight": number(value, 2.0), "layers.1.weight": number(value, 4.0)}


def net():
    return Net(Negated(), Plain())


def live():
    return Live(net, state(1.0), version="A")


class Fault(Exception):
    """What a source raises here."""


def breaking(weights, position):
    yield from list(weights.items())[:position]
    raise Fault(position)


# ------------------------------------------------------------------------------ after a failure


@pytest.mark.holds("H01")
@pytest.mark.parametrize("position", [0, 1, 2])
def test_a_failed_load_leaves_every_tensor_with_its_memory(position, commit):
    """A product with a tensor on meta raises no error, it gives numbers that nobody wrote. After
    any failure the model computes what it did, or refuses."""
    serving = live()
    before = serving.model(X)
    session = serving.open(commit=commit)
    with pytest.raises(Fault):
        session.load(breaking(state(5.0), position))
    serving.in_place()
    if poison_of(serving.model) is None:
        assert identical(serving.model(X), before)
    else:
        with pytest.raises(ModelPoisonedError):
            serving.model(X)
    assert (poison_of(serving.model) is not None) == (commit == "stream" and position > 0)


@pytest.mark.holds("H02")
def test_a_load_that_failed_is_not_active_for_ever(commit):
    """Whether it failed in a block, in a call, or was aborted: the next one may begin."""
    serving = live()
    with pytest.raises(Fault), WeightLoadSession(serving.model, commit=commit) as session:
        session.load(breaking(state(5.0), 0))
    start_reload(serving.model, commit=commit)
    with pytest.raises(ModelBusyError):
        start_reload(serving.model)
    with pytest.raises(Fault):
        open_session(serving.model).load(breaking(state(5.0), 1))
    assert open_session(serving.model) is None
    start_reload(serving.model, commit=commit)
    abort_reload(serving.model)
    start_reload(serving.model, commit=commit)
    open_session(serving.model).load(state(5.0))
    finish_reload(serving.model)
    serving.equals(state(5.0))


@pytest.mark.holds("H03", "H08", "H12")
def test_a_model_that_holds_a_mixture_refuses_whoever_resumes_it():
    """The caller's clean-up puts the worker back into service, whatever happened. The first layer
    is new and the second old; nothing computes with them until everything has come."""
    serving = live()
    try:
        with WeightLoadSession(serving.model, version="B") as session:
            session.load(breaking(state(5.0), 1))
    except Fault:
        pass
    finally:
        resumed = serving.model
    assert session.receipt.outcome == "poisoned"
    for call in (resumed, resumed.layers[1], lambda x: require_usable(resumed)):
        with pytest.raises(ModelPoisonedError, match=f"session {session.id}"):
            call(X)
    assert weights_version(resumed) is None
    session = serving.open()
    session.abort("not even begun")
    with pytest.raises(ModelPoisonedError):
        resumed(X)
    serving.reload(state(5.0), version="B")
    serving.equals(state(5.0))
    assert weights_version(resumed) == "B"


@pytest.mark.holds("H12")
@pytest.mark.parametrize("position", [0, 1, 2])
def test_an_abort_says_whether_live_weights_were_written(position, commit):
    """It drops what is staged. Earlier buckets may be live by then, and it says so."""
    serving = live()
    session = serving.open(commit=commit)
    for pair in list(state(5.0).items())[:position]:
        session.load([pair])
    receipt = session.abort("no time")
    assert receipt.cause == "no time"
    written = commit == "stream" and position > 0
    assert receipt.model_intact == (not written)
    assert (poison_of(serving.model) is not None) == written
    assert ("poisoned" in receipt.outcome) == written
    if not written:
        serving.unchanged()


@pytest.mark.holds("H04", "H11")
@pytest.mark.parametrize("bad", [0, 1])
def test_a_version_is_not_published_when_a_chunk_has_failed(bad, commit):
    """The caller goes on after the failure, sends the other chunk, and finishes to clean up. Every
    call raises, and none returns something that could be overlooked."""
    serving = live()
    told = []
    session = serving.open(
        commit=commit, version="B", publish=[lambda *versions: told.append(versions)]
    )
    failures = 0
    for index, pair in enumerate(state(5.0).items()):
        try:
            result = session.load([pair] if index != bad else breaking({}, 0))
        except (Fault, InvalidTransitionError):
            failures += 1
        else:
            assert result is None
    assert failures == 2 - bad
    with pytest.raises(InvalidTransitionError, match="single use"):
        session.finish()
    assert weights_version(serving.model) in ("A", None)
    assert told == []
    assert session.receipt.version == "B"
    assert session.receipt.outcome in ("aborted", "poisoned")


@pytest.mark.holds("H11")
def test_what_finish_returns_is_a_receipt_of_a_load_that_succeeded(commit):
    """There is no other value, and no other way to get one from `finish`."""
    serving = live()
    session = serving.open(commit=commit)
    session.load(state(5.0))
    receipt = session.finish()
    assert type(receipt) is Receipt
    assert (receipt.outcome, receipt.model_intact) == ("finished", True)
    session = serving.open(commit=commit)
    with pytest.raises(IncompleteLoadError):
        session.finish()
    assert session.receipt.outcome == "aborted"


@pytest.mark.holds("H09")
def test_a_checkpoint_that_failed_is_not_what_the_next_load_is_compared_with(commit):
    """Its names and shapes are forgotten with it: a load of the old kind is complete, and names
    that only the failed one had are unknown."""
    serving = live()
    strange = {**state(5.0), "layers.2.weight": number(7.0)}
    broken = {"layers.0.weight": number(1.0, 2.0, 3.0), "layers.1.weight": number(3.0, 4.0)}
    with serving.refuses(WeightMismatchError, "layers.0.weight", commit=commit) as session:
        session.load(broken)
    for _ in range(2):
        with serving.refuses(UnexpectedWeightError, "layers.2.weight", commit=commit) as session:
            session.load(strange)
    assert weights_version(serving.model) == "A"
    with serving.refuses(WeightMismatchError, "(2,)", commit=commit) as session:
        session.load(broken)
    serving.reload(state(6.0), commit=commit, version="B")
    serving.equals(state(6.0))


# ------------------------------------------------------------------------------ beginning


class Slotted(nn.Parameter):
    """A kind of parameter that cannot be made a second time: its layout is its own."""

    __slots__ = ("extra",)


class Fragile(Negated):
    """May hold a parameter that a session cannot stage."""

    def __init__(self, *, slotted=False):
        super().__init__()
        if slotted:
            self.weight = Slotted(torch.zeros(2), requires_grad=False)


@pytest.mark.holds("H06")
def test_a_beginning_that_fails_half_way_puts_back_what_it_had_changed(commit):
    """The first layer is parked when the second one turns out to be impossible to stage. The
    caller has no session in hand; the model is free and computes as before."""
    weights = {"layers.0.weight": number(1.0, 2.0), "layers.1.weight": number(3.0, 4.0)}
    serving = Live(lambda: Net(Fragile(), Fragile(slotted=True)), weights)
    with pytest.raises((WeightLoadError, TypeError)) as caught:
        start_reload(serving.model, commit=commit)
    assert "no live weight was written" in caught.value.__notes__[0]
    assert open_session(serving.model) is None
    assert owner_of(serving.model.layers[0]) is None
    assert poison_of(serving.model) is None
    serving.unchanged()
    assert identical(serving.model(X), X - 3.0 - 7.0)


# ------------------------------------------------------------------------------ callers


@pytest.mark.holds("H13")
def test_nested_owners_finish_one_load_once(commit):
    """A model's wrapped `load_weights`, the engine and its worker each open and finish. The inner
    ones are refused and change nothing; the outer one finishes."""
    serving = live()
    errors = []

    class Wrapped(Net):
        def load_weights(self, weights):
            for call in (lambda: start_reload(self), lambda: finish_reload(self)):
                try:
                    call()
                except WeightLoadError as error:
                    errors.append(type(error).__name__)
            super().load_weights(weights)

    serving.model.__class__ = Wrapped
    receipt = serving.reload(state(5.0), commit=commit)
    assert errors == ["SessionMisnestedError", "SessionMisnestedError"]
    assert receipt.hooks_run == 1
    assert serving.model.layers[0].weight.tolist() == [-5.0, -2.0]


class Ranks:
    """Two ranks with one layer each, and a caller that adds up what they report."""

    def __init__(self):
        self.lives = [Live(lambda: Net(Plain()), {"layers.0.weight": number(r, r)}) for r in (0, 1)]

    def sessions(self, **options):
        return [one.open(**options) for one in self.lives]


@pytest.mark.holds("H14")
def test_a_tensor_too_many_on_one_rank_does_not_make_up_for_one_too_few_on_another(commit):
    """Two tensors were sent and two arrived. Each rank speaks for itself."""
    ranks = Ranks()
    first, second = ranks.sessions(commit=commit)
    with pytest.raises(UnexpectedWeightError, match=r"layers\.1\.weight"):
        first.load({"layers.0.weight": number(5.0, 5.0), "layers.1.weight": number(6.0, 6.0)})
    with pytest.raises(IncompleteLoadError, match=r"layers\.0\.weight"):
        second.finish()
    assert [s.receipt.unexpected.count for s in (first, second)] == [1, 0]
    assert [s.receipt.missing.count for s in (first, second)] == [0, 1]
    for one in ranks.lives:
        one.unchanged()


@pytest.mark.holds("H07")
@pytest.mark.parametrize("bad", [0, 1])
def test_a_rank_that_fails_says_so_before_any_rank_has_committed(bad):
    """All ranks seal, then all commit. The one that fails raises on its own, in a call that waits
    for nobody; the other one is aborted, and both serve what they did."""
    ranks = Ranks()
    sessions = ranks.sessions(commit="atomic")
    failed = []
    for rank, session in enumerate(sessions):
        try:
            session.load({"layers.0.weight": number(5.0, rank)} if rank != bad else {})
            session.seal()
        except IncompleteLoadError as error:
            failed.append((rank, error.model_intact))
    assert failed == [(bad, True)]
    sessions[1 - bad].abort("another rank failed")
    assert [session.state for session in sessions] == [SessionState.ABORTED] * 2
    for one in ranks.lives:
        one.unchanged()


@pytest.mark.holds("H15")
@pytest.mark.parametrize("attempt", [None, "fails", "succeeds"])
def test_a_model_that_was_never_published_can_be_told_from_one_that_was(attempt):
    """An engine that came back has no version until a load has finished."""
    model = net()
    assert weights_version(model) is None
    if attempt is None:
        return
    session = WeightLoadSession(model, framework=framework_for(model), version="A")
    session.prepare()
    if attempt == "fails":
        with pytest.raises(Fault):
            session.load(breaking(state(1.0), 1))
        assert weights_version(model) is None
        return
    session.load(state(1.0))
    assert weights_version(model) is None, "not yet"
    session.finish()
    assert weights_version(model) == "A"


class Draft(Net):
    """Shares the target's first layer, and has one of its own."""

    def load_weights(self, weights):
        super().load_weights(
            (name.replace("draft.", "layers."), tensor)
            for name, tensor in weights
            if name != "layers.1.weight"
        )


@pytest.mark.holds("H16")
def test_a_draft_that_was_not_loaded_with_its_target_can_be_told(commit):
    """The draft has a session of its own, fed from the same list. Until then its version is that
    of neither load."""
    target = net()
    draft = Draft(target.layers[0], Plain())
    framework = framework_for(target, draft)

    def received(value):
        return [*state(value).items(), ("draft.1.weight", number(value, 8.0))]

    def load(model, value):
        names = {"layers.0.weight", "layers.1.weight"}
        pairs = received(value)
        if model is target:
            pairs = [pair for pair in pairs if pair[0] in names]
        with WeightLoadSession(model, framework=framework, version=value, commit=commit) as s:
            s.load(pairs)

    load(target, 1.0)
    load(draft, 1.0)
    assert (weights_version(target), weights_version(draft)) == (1.0, 1.0)
    load(target, 5.0)
    assert weights_version(target) == 5.0
    assert weights_version(draft) is None
    assert draft.layers[1].weight.tolist() == [1.0, 8.0], "this is the defect"
    load(draft, 5.0)
    assert (weights_version(target), weights_version(draft)) == (5.0, 5.0)
    assert target.layers[0].weight.tolist() == [-5.0, -2.0]
    assert draft.layers[1].weight.tolist() == [5.0, 8.0]
