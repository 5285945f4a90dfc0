"""What does not fit is refused by name, and the session says truly whether the model is intact."""

import copy

import pytest
import torch
from torch import nn

from weightload import (
    DuplicateWeightError,
    IncompleteLoadError,
    ModelPoisonedError,
    ProcessingError,
    Scope,
    SessionState,
    StorageChangedError,
    UnclassifiedModuleError,
    UnexpectedWeightError,
    UnsupportedError,
    UsageError,
    WeightLoadError,
    WeightLoadSession,
    WeightMismatchError,
    poison_of,
    require_usable,
    weights_version,
)
from weightload.testing import (
    TOYS,
    BareModel,
    Bench,
    LoadingModel,
    TiedModel,
    ToyFault,
    check_equal,
    make_state,
)
from weightload.testing.layers import WIDTH, Linear, RepackedLinear, parameter
from weightload.testing.sharing import HandleLinear

COMMITS = ("stream", "atomic")
SOME = ("plain", "repacked", "tied", "fused", "bare copies", "everything")
"""Toys whose loaders differ."""


@pytest.fixture(params=COMMITS)
def commit(request):
    return request.param


@pytest.fixture(params=SOME)
def bench(request):
    return Bench(TOYS[request.param])


def as_list(items):
    return list(items)


def as_generator(items):
    return iter(list(items))


@pytest.fixture(params=[as_list, as_generator], ids=["list", "generator"])
def source(request):
    """How the tensors are handed over; a list can be checked before anything is written."""
    return request.param


def refused(bench, commit, expected, act, **options):
    """Let ``act`` fail in a session of its own, check what is left; return error and session."""
    session = bench.open(commit=commit, **options)
    with pytest.raises(expected) as caught:
        act(session)
    error = caught.value
    assert type(error) is expected
    bench.check_ended(session, error if isinstance(error, WeightLoadError) else None)
    if commit == "atomic":
        assert session.state is SessionState.ABORTED
    notes = "\n".join(error.__notes__)
    assert ("poisoned" in notes) == (session.state is SessionState.POISONED)
    bench.check_recovers()
    return error, session


# ------------------------------------------------------------------------------ names and shapes


@pytest.mark.holds("F05")
@pytest.mark.parametrize("place", ["first", "last"])
def test_an_unknown_name_is_refused(bench, commit, source, place):
    """The model has no place for the name; a list is refused before a byte is written."""
    items = list(bench.state(2).items())
    items.insert(0 if place == "first" else len(items), ("layers.77.weight", torch.ones(WIDTH)))
    error, session = refused(
        bench, commit, UnexpectedWeightError, lambda session: session.load(source(items))
    )
    assert "layers.77.weight" in str(error)
    if source is as_list or place == "first":
        assert session.state is SessionState.ABORTED


@pytest.mark.holds("F05")
def test_a_name_that_the_loaders_ignore_is_refused(commit, source):
    """Many models skip names that they do not know; such a weight would be lost silently."""

    class Skipping(LoadingModel):
        def store(self, name, tensor):
            if "77" not in name:
                super().store(name, tensor)

    bench = Bench(lambda: Skipping(Linear(), RepackedLinear()))
    items = [*bench.state(2).items(), ("layers.77.weight", torch.ones(WIDTH))]
    error, _ = refused(
        bench, commit, UnexpectedWeightError, lambda session: session.load(source(items))
    )
    assert "layers.77.weight" in str(error)


@pytest.mark.holds("E06")
def test_a_name_that_the_first_load_ignored_may_be_ignored_again(commit):
    """A rank ignores the experts of others; what it ignored at first it may ignore later."""

    class Skipping(LoadingModel):
        def store(self, name, tensor):
            if "77" not in name:
                super().store(name, tensor)

    model = Skipping(Linear(), RepackedLinear())
    for seed in (1, 2):
        state = make_state(lambda: Skipping(Linear(), RepackedLinear()), seed)
        with WeightLoadSession(model, framework=_framework(), commit=commit) as session:
            session.load({**state, "layers.77.weight": torch.ones(WIDTH)})
        assert session.receipt.skipped.count == 1
        check_equal(model, lambda: Skipping(Linear(), RepackedLinear()), state)


def _framework():
    from weightload.testing import toy_framework

    return toy_framework()


BAD_SHAPES = {
    "one row more": lambda good: torch.cat([good, good[:1]]),
    "one row less": lambda good: good[1:],
    "one row, to be broadcast": lambda good: good[:1],
    "a vector, to be broadcast": lambda good: good[0],
    "a number, to be broadcast": lambda good: torch.tensor(1.0),
    "empty": lambda good: good[:0],
    "a dimension more": lambda good: good[None],
}


@pytest.mark.holds("I08", "W18")
@pytest.mark.parametrize("bad", BAD_SHAPES)
def test_another_shape_is_refused(bench, commit, source, bad):
    """The shape must be that of the first load; above all it is never broadcast."""
    state = bench.state(2)
    name = max(name for name, tensor in state.items() if tensor.ndim == 2)
    items = [(n, BAD_SHAPES[bad](t) if n == name else t) for n, t in state.items()]
    error, session = refused(
        bench, commit, WeightMismatchError, lambda session: session.load(source(items))
    )
    assert name in str(error)
    assert str(tuple(state[name].shape)) in str(error)
    if source is as_list:
        assert session.state is SessionState.ABORTED


def test_every_name_is_checked_for_its_shape(commit):
    """There is no tensor for which a wrong shape gets through."""
    bench = Bench(TOYS["everything"])
    state = bench.state(2)
    for name in state:
        session = bench.open(commit=commit)
        with pytest.raises(WeightMismatchError, match="shape"):
            session.load({**state, name: state[name].reshape(-1)[:1]})
        bench.check_ended(session)
        assert session.state is SessionState.ABORTED
    bench.check_recovers()


class Shifted(Linear):
    """Adds a row of numbers that checkpoints may leave out."""

    def __init__(self):
        super().__init__()
        self.scale = parameter(WIDTH, fill=0.0)

    def forward(self, x):
        return super().forward(x) + self.scale


@pytest.mark.holds("W18")
def test_a_new_name_is_not_broadcast_either(commit, source):
    """The first load did not have it, so that no shape is known but that of its place."""
    bench = Bench(lambda: BareModel(Shifted(), Linear()))
    items = [*bench.state(2).items(), ("layers.0.scale", torch.ones(1))]
    error, _ = refused(
        bench, commit, WeightMismatchError, lambda session: session.load(source(items))
    )
    assert "layers.0.scale" in str(error)
    assert "broadcast" in str(error)


@pytest.mark.parametrize(
    ("item", "found"),
    [
        ("no pair", "str"),
        (("layers.0.weight",), "tuple"),
        (("layers.0.weight", [1.0]), "list"),
        ((7, torch.ones(WIDTH, WIDTH)), "int"),
        (("layers.0.weight", torch.ones(WIDTH, WIDTH, device="meta")), "meta"),
        (None, "NoneType"),
    ],
)
def test_what_is_no_name_with_a_tensor_is_refused(commit, source, item, found):
    """A source that yields something else is told what was found."""
    bench = Bench(TOYS["plain"])
    items = [("layers.1.weight", torch.ones(WIDTH, WIDTH)), item]
    error, session = refused(
        bench, commit, WeightMismatchError, lambda session: session.load(source(items))
    )
    assert found in str(error)
    if source is as_list:
        assert session.state is SessionState.ABORTED


def freed(tensor):
    """Return what FSDP leaves of a parameter that it has put away."""
    tensor = tensor.clone()
    tensor.untyped_storage().resize_(0)
    return tensor


def cut_short(tensor):
    tensor = tensor.clone()
    tensor.untyped_storage().resize_(tensor.nbytes - 4)
    return tensor


def quantised(tensor):
    return torch.quantize_per_tensor(tensor, 0.1, 0, torch.qint8)


class Wrapper(torch.Tensor):
    """Keeps its data in another tensor, as a DTensor does."""

    @staticmethod
    def __new__(cls, inner):
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made

    def __tensor_flatten__(self):
        return ["inner"], None

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError(func)


@pytest.mark.parametrize("plans", [False, True])
@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (freed, "no memory"),
        (cut_short, "no memory"),
        (torch.Tensor.to_sparse, "to_dense"),
        (quantised, "dequantize"),
        (Wrapper, "full_tensor"),
    ],
    ids=["freed", "cut short", "sparse", "quantised", "wrapper"],
)
@pytest.mark.parametrize("toy", ["plain", "repacked"])
def test_what_is_no_plain_tensor_with_memory_is_refused(toy, spoil, says, commit, source, plans):
    """To copy it would read what is not there, or end the process."""
    bench = Bench(TOYS[toy])
    for seed in (3, 4):
        bench.reload(bench.state(seed), plans=plans)
    state = bench.state(2)
    items = [(n, spoil(t) if n == "layers.1.weight" else t) for n, t in state.items()]
    error, session = refused(
        bench,
        commit,
        WeightMismatchError,
        lambda session: session.load(source(items)),
        plans=plans,
    )
    assert "'layers.1.weight'" in str(error)
    assert says in str(error)
    if source is as_list:
        assert session.state is SessionState.ABORTED


@pytest.mark.parametrize("plans", [False, True])
def test_the_models_own_tensors_in_other_places_give_what_they_held(commit, plans):
    """To rename them is how layers and experts are reordered; each is overwritten by another."""
    bench = Bench(TOYS["fused"])
    for seed in (2, 3):
        bench.reload(bench.state(seed), plans=plans)
    for seed in (4, 5):
        live = bench.model.layers[0].weight.detach()
        state = {**bench.state(seed), "layers.1.weight": live[:WIDTH]}
        for at in range(3):
            state[f"layers.0.weight/{at}"] = live[2 * WIDTH - at * WIDTH :][:WIDTH]
        wanted = {name: tensor.clone() for name, tensor in state.items()}
        with bench.session(commit=commit, plans=plans) as session:
            session.load(state)
        bench.serves = wanted
        bench.check_finished(session)


@pytest.mark.parametrize("plans", [False, True])
def test_the_models_own_tensors_one_by_one_are_refused_unless_they_stay(commit, plans):
    bench = Bench(TOYS["plain"])
    for seed in (2, 3):
        bench.reload(bench.state(seed), plans=plans)
    live = bench.model.state_dict()
    session = bench.open(commit=commit, plans=plans)
    session.load(iter(live.items()))
    session.finish()
    bench.check_finished(session)
    names, tensors = zip(*live.items(), strict=True)
    wanted = dict(zip(names, [one.clone() for one in reversed(tensors)], strict=True))
    session = bench.open(commit=commit, plans=plans)
    swapped = zip(names, reversed(tensors), strict=True)
    if commit == "atomic":
        session.load(swapped)
        session.finish()
        bench.serves = wanted
        bench.check_finished(session)
    else:
        with pytest.raises(UnsupportedError, match="own memory"):
            session.load(swapped)
        assert session.state is SessionState.ABORTED
        bench.check_finished(bench.reload(wanted))


def test_other_state_than_tensors_may_be_dropped_by_its_name(commit, source):
    """``state_dict`` has what ``get_extra_state`` gives."""
    bench = Bench(TOYS["plain"])
    items = [*bench.state(2).items(), ("layers.0._extra_state", {"amax": 1})]
    error, _ = refused(
        bench, commit, WeightMismatchError, lambda session: session.load(source(items))
    )
    assert "layers.0._extra_state" in str(error)
    with bench.session(commit=commit, scope=Scope.full(allow_unexpected=["*_extra_state"])) as one:
        one.load(source(items))
    bench.serves = bench.state(2)
    bench.check_finished(one)


@pytest.mark.parametrize("plans", [False, True])
@pytest.mark.parametrize("weights", [5, torch.nn.Linear(2, 2).state_dict], ids=["number", "method"])
def test_what_is_no_source_is_said_so(plans, weights):
    bench = Bench(TOYS["plain"])
    for seed in (2, 3):
        bench.reload(bench.state(seed), plans=plans)
    session = bench.open(plans=plans)
    with pytest.raises(UsageError, match="mapping of names"):
        session.load(weights)
    bench.check_ended(session)


# ------------------------------------------------------------------------------ too much


@pytest.mark.holds("frameworks-B", "W9")
def test_a_name_that_comes_twice_in_one_source_is_refused(bench, commit, source):
    """Equal values are no excuse: one of the two is one too many."""
    items = list(bench.state(2).items())
    items.append(items[0])
    error, _ = refused(
        bench, commit, DuplicateWeightError, lambda session: session.load(source(items))
    )
    assert items[0][0] in str(error)


@pytest.mark.holds("frameworks-C")
def test_a_name_that_comes_in_two_loads_is_refused(bench, commit, source):
    """A tensor that comes again after its layer was processed would be lost."""
    items = list(bench.state(2).items())

    def act(session):
        session.load(source(items))
        session.load(source([(items[0][0], items[0][1] + 1)]))

    error, _ = refused(bench, commit, DuplicateWeightError, act)
    assert items[0][0] in str(error)


def test_two_names_for_one_place_with_different_values_are_refused(commit, source):
    """Tied weights come under a second name now and differ: the model cannot hold both."""
    bench = Bench(TOYS["tied"])
    state = bench.state(2)
    state["head.weight"] = state["embedding.weight"] + 1
    error, _ = refused(
        bench, commit, DuplicateWeightError, lambda session: session.load(source(state.items()))
    )
    assert "head.weight" in str(error)
    assert "embedding.weight" in str(error)


def test_two_names_for_one_place_with_equal_values_are_accepted(commit, source):
    """Tied weights come under a second name now and are equal: nothing is ambiguous."""
    bench = Bench(TOYS["tied"])
    state = bench.state(2)
    with WeightLoadSession(bench.model, commit=commit) as session:
        session.load(source({**state, "head.weight": state["embedding.weight"].clone()}.items()))
    bench.serves = state
    bench.check_finished(session)


@pytest.mark.parametrize("order", [list, reversed], ids=["in order", "reversed"])
def test_of_names_that_the_first_load_repeated_the_same_one_wins(commit, source, order):
    """Both names came at first and the last one counted: it counts again, in any order."""
    bench = Bench(TOYS["tied, both names"])
    state = bench.state(2)
    state["embedding.weight"] = state["head.weight"] + 1
    with WeightLoadSession(bench.model, commit=commit) as session:
        session.load(source(order(state.items())))
    bench.serves = state
    bench.check_finished(session)


@pytest.mark.parametrize("left_out", ["embedding.weight", "head.weight"])
def test_of_names_that_the_first_load_repeated_one_is_enough(commit, source, left_out):
    """A trainer sends tied weights once, whatever the first checkpoint did."""
    bench = Bench(TOYS["tied, both names"])
    state = {name: tensor for name, tensor in bench.state(2).items() if name != left_out}
    with WeightLoadSession(bench.model, commit=commit) as session:
        session.load(source(state.items()))
    bench.serves = state
    bench.check_finished(session)


class Overlapping(LoadingModel):
    """Takes a weight whole, or in two halves that overlap by one row."""

    def store(self, name, tensor):
        whole, _, part = name.partition("#")
        place = self.get_parameter(whole).data
        start = {"": 0, "upper": 0, "lower": WIDTH // 2 - 1}[part]
        place[start : start + len(tensor)].copy_(tensor)


def test_parts_that_overlap_are_refused(commit):
    """A whole weight and a part of it: whichever came last would win."""
    bench = Bench(lambda: Overlapping(Linear(), Linear()))
    state = bench.state(2)
    extra = {"layers.0.weight#lower": state["layers.0.weight"][WIDTH // 2 - 1 :] + 1}

    def act(session):
        session.load({**state, **extra})
        session.finish()

    error, _ = refused(bench, commit, DuplicateWeightError, act)
    assert "layers.0.weight" in str(error)


# ------------------------------------------------------------------------------ too little


@pytest.mark.holds("frameworks-G")
@pytest.mark.parametrize("toy", TOYS)
def test_each_tensor_that_never_arrives_is_missed(toy, commit):
    """Whatever is left out, finish refuses, and names the place."""
    bench = Bench(TOYS[toy])
    state = bench.state(2)
    for name in state:
        if toy == "tied, both names" and name in ("embedding.weight", "head.weight"):
            continue  # either one is enough
        if not state[name].numel():
            continue  # nothing is missing without it
        session = bench.open(commit=commit)
        session.load({other: tensor for other, tensor in state.items() if other != name})
        with pytest.raises(IncompleteLoadError) as caught:
            session.finish()
        assert name.split("/")[0] in str(caught.value)
        bench.check_ended(session, caught.value)
        if commit == "atomic":
            assert session.state is SessionState.ABORTED
    bench.check_recovers()


@pytest.mark.holds("frameworks-R3")
def test_the_missing_part_of_a_fused_tensor_is_named(commit):
    """Two of three shards came: the message says which rows did not."""
    bench = Bench(TOYS["fused"])
    state = bench.state(2)
    del state["layers.0.weight/1"]

    def act(session):
        session.load(state)
        session.finish()

    error, _ = refused(bench, commit, IncompleteLoadError, act)
    assert f"layers.0.weight [{WIDTH}:{2 * WIDTH}, 0:{WIDTH}]" in str(error)


def exhausted():
    """Return a generator that was read to its end."""
    spent = iter([("layers.0.weight", torch.ones(1))])
    list(spent)
    return spent


@pytest.mark.holds("H10", "I09", "W27")
@pytest.mark.parametrize("nothing", [list, dict, exhausted], ids=["list", "mapping", "exhausted"])
def test_an_empty_source_does_not_leave_the_old_weights_in_place_silently(bench, commit, nothing):
    """An exhausted iterator is a caller's mistake, and finish says so."""

    def act(session):
        session.load(nothing())
        session.finish()

    error, session = refused(bench, commit, IncompleteLoadError, act)
    assert "empty or exhausted" in str(error)
    assert session.state is SessionState.ABORTED


@pytest.mark.holds("H10")
def test_finish_without_any_load_is_refused(bench, commit):
    """Prepare and finish alone load nothing."""
    error, session = refused(bench, commit, IncompleteLoadError, lambda session: session.finish())
    assert error.facts["received"] == 0
    assert session.state is SessionState.ABORTED


@pytest.mark.long_way("a loader stops early")
def test_a_loader_that_stops_early_is_caught(commit):
    """The model's loaders returned before the source was empty."""

    class Hasty(LoadingModel):
        hasty = False

        def load_weights(self, weights):
            for number, (name, tensor) in enumerate(weights):
                self.store(name, tensor)
                if self.hasty and number == 0:
                    return

    bench = Bench(lambda: Hasty(Linear(), Linear()))

    def act(session):
        bench.model.hasty = True
        try:
            session.load(bench.state(2))
        finally:
            bench.model.hasty = False

    error, _ = refused(bench, commit, UnexpectedWeightError, act)
    assert "layers.1.weight" in str(error)


# ------------------------------------------------------------------------------ exceptions


class SourceError(Exception):
    """What a source raises."""


def load_and_finish(session, state):
    """A hook may fail as soon as its layer is complete, or at the end."""
    session.load(state)
    session.finish()


def failing_source(items, position, error):
    for number, item in enumerate(items):
        if number == position:
            raise error
        yield item
    if position == len(items):
        raise error


@pytest.mark.holds("H01", "frameworks-I")
@pytest.mark.parametrize("toy", TOYS)
def test_what_a_source_raises_reaches_the_caller_at_every_point(toy, commit):
    """At the start, between any two tensors, after the last: the same object comes out."""
    bench = Bench(TOYS[toy])
    items = list(bench.state(2).items())
    for position in range(len(items) + 1):
        session = bench.open(commit=commit)
        error = SourceError(position)
        with pytest.raises(SourceError) as caught:
            session.load(failing_source(items, position, error))
        assert caught.value is error
        bench.check_ended(session)
        if commit == "atomic" or position == 0:
            assert session.state is SessionState.ABORTED
        if session.state is SessionState.POISONED:
            assert "SourceError" in poison_of(bench.model).cause
            bench.reload(bench.state(1))
    bench.check_recovers()


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(1), GeneratorExit()])
def test_what_is_no_exception_ends_the_session_too(bench, commit, error):
    """An interrupt in the middle of a load must not leave the model half loaded unnoticed."""
    items = list(bench.state(2).items())
    session = bench.open(commit=commit)
    with pytest.raises(type(error)):
        session.load(failing_source(items, len(items) // 2, error))
    bench.check_ended(session)
    bench.check_recovers()


class Lazy:
    """A source that is neither a sequence nor an iterator: it reads while it is iterated."""

    def __init__(self, items, position, error):
        self.parts = items, position, error

    def __iter__(self):
        return failing_source(*self.parts)


def test_what_an_iterable_raises_reaches_the_caller(bench, commit):
    """A reader object is a source like any other."""
    error = SourceError()
    items = list(bench.state(2).items())
    session = bench.open(commit=commit)
    with pytest.raises(SourceError) as caught:
        session.load(Lazy(items, 1, error))
    assert caught.value is error
    bench.check_ended(session)
    bench.check_recovers()


def test_an_iterable_may_reuse_its_buffer(bench, commit):
    """A reader object that yields views of one buffer is not read ahead of the loaders."""
    state = bench.state(2)
    buffer = torch.empty(max(tensor.numel() for tensor in state.values()))

    class Reader:
        def __iter__(self):
            for name, tensor in state.items():
                view = buffer[: tensor.numel()].view(tensor.shape)
                yield name, view.copy_(tensor)

    with WeightLoadSession(bench.model, commit=commit) as session:
        session.load(Reader())
    bench.serves = state
    bench.check_finished(session)


class Deaf(LoadingModel):
    """Goes on when something fails, as if nothing had happened."""

    def load_weights(self, weights):
        source = iter(weights)
        while True:
            try:
                self.store(*next(source))
            except StopIteration:
                return
            except Exception:
                continue


@pytest.mark.parametrize("position", [0, 1, 2])
def test_a_loader_cannot_swallow_what_a_source_raises(commit, position):
    """Even after the last tensor, when everything has come: the source did not end well."""
    bench = Bench(lambda: Deaf(RepackedLinear(), Linear()))
    error = SourceError()
    session = bench.open(commit=commit)
    with pytest.raises(SourceError) as caught:
        session.load(failing_source(list(bench.state(2).items()), position, error))
    assert caught.value is error
    bench.check_ended(session)
    bench.check_recovers()


def test_a_loader_cannot_swallow_a_failed_hook():
    """A layer is processed between two tensors, inside the loader's own loop."""
    bench = Bench(lambda: Deaf(RepackedLinear(), Linear()))
    bench.framework.fail_hook()
    refused(bench, "stream", ProcessingError, lambda session: session.load(bench.state(2)))


def test_a_loader_cannot_swallow_a_refused_write(commit, source):
    """Two names for one place, with different values: the second one was not written."""

    class DeafTied(Deaf, TiedModel):
        pass

    bench = Bench(lambda: DeafTied(Linear()))
    state = bench.state(2)
    state["head.weight"] = state["embedding.weight"] + 1
    refused(
        bench, commit, DuplicateWeightError, lambda session: session.load(source(state.items()))
    )


@pytest.mark.long_way("a loader raises")
@pytest.mark.holds("frameworks-F")
@pytest.mark.parametrize("toy", ["fused", "collecting", "bare copies", "everything"])
@pytest.mark.parametrize("half_way", [False, True], ids=["before", "after"])
def test_a_loader_that_raises_at_any_tensor_is_named(toy, commit, half_way, monkeypatch):
    """Before it wrote or after: the tensor at fault is in the message."""
    bench = Bench(TOYS[toy])
    names = list(bench.state(2))
    store = type(bench.model).store
    for name in names:

        def failing(model, current, tensor, name=name):
            if half_way or current != name:
                store(model, current, tensor)
            if current == name:
                raise ZeroDivisionError("the loader failed")

        session = bench.open(commit=commit)
        with monkeypatch.context() as patch:
            patch.setattr(type(bench.model), "store", failing)
            with pytest.raises(WeightMismatchError) as caught:
                session.load(bench.state(2).items())
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
        if toy != "collecting":  # what it holds when it writes is not what it asked for last
            assert repr(name) in str(caught.value)
        bench.check_ended(session, caught.value)
        if commit == "atomic":
            assert session.state is SessionState.ABORTED
    bench.check_recovers()


@pytest.mark.holds("W14")
@pytest.mark.parametrize("toy", TOYS)
@pytest.mark.parametrize("half_way", [False, True], ids=["before", "half way"])
def test_a_hook_that_raises_is_named_whichever_it_is(toy, commit, half_way):
    """Before it did anything, or when it had changed everything: no trace of it is left."""
    bench = Bench(TOYS[toy])
    for number in range(len(bench.framework.calls)):
        session = bench.open(commit=commit)
        bench.framework.fail_hook(number, half_way=half_way)
        with pytest.raises(ProcessingError) as caught:
            load_and_finish(session, bench.state(2))
        assert isinstance(caught.value.__cause__, ToyFault)
        assert bench.model.get_submodule(caught.value.facts["module"]) is not None
        assert repr(caught.value.facts["module"]) in str(caught.value)
        bench.check_ended(session, caught.value)
        if commit == "atomic":
            assert session.state is SessionState.ABORTED
    bench.check_recovers()


@pytest.mark.holds("H05")
def test_what_goes_wrong_in_the_clean_up_is_attached_to_the_first_error(commit, monkeypatch):
    """The error that broke the load is the one that is raised."""
    from weightload.board import Board

    bench = Bench(TOYS["repacked"])
    session = bench.open(commit=commit)
    restore = Board.restore

    def failing(board):
        restore(board)
        raise OSError("the clean-up failed")

    monkeypatch.setattr(Board, "restore", failing)
    with pytest.raises(SourceError) as caught:
        session.load(failing_source(list(bench.state(2).items()), 1, SourceError()))
    monkeypatch.undo()
    assert any("OSError: the clean-up failed" in note for note in caught.value.__notes__)
    assert session.state.terminal
    bench.check_recovers()


# ------------------------------------------------------------------------------ models


@pytest.mark.holds("C15")
def test_a_module_with_a_hook_and_no_rule_is_refused_before_anything_else():
    """Somebody has to say whether its hook is to be called, and when."""

    class Unknown(nn.Module):
        def process_weights_after_loading(self):
            raise AssertionError("nobody may call it")

    model = nn.Sequential(nn.Linear(2, 2), Unknown())
    session = WeightLoadSession(model)
    with pytest.raises(UnclassifiedModuleError) as caught:
        session.prepare()
    assert "'1'" in str(caught.value)
    assert "Unknown" in str(caught.value)
    assert session.state is SessionState.ABORTED
    assert poison_of(model) is None


def test_a_copy_of_a_loaded_model_is_refused():
    """What processing did to the original is not known of the copy."""
    bench = Bench(TOYS["repacked"])
    twin = copy.deepcopy(bench.model)
    session = WeightLoadSession(twin)
    with pytest.raises(UnsupportedError, match="copy"):
        session.prepare()
    assert session.state is SessionState.ABORTED
    bench.check_recovers()


def test_a_module_that_was_added_after_the_first_load_is_refused():
    """Its hook ran outside of any session, or not at all: nobody can undo it."""
    bench = Bench(TOYS["repacked"])
    bench.model.layers.append(RepackedLinear())
    session = WeightLoadSession(bench.model)
    with pytest.raises(UnsupportedError, match=r"layers\.3"):
        session.prepare()
    del bench.model.layers[3]
    bench.check_ended(session)
    bench.check_recovers()


def test_a_hook_that_moves_a_live_tensor_only_sometimes_is_caught():
    """Nothing showed at the first load; graphs that know the old memory are stale now."""

    class Moving(HandleLinear):
        def process_weights_after_loading(self):
            super().process_weights_after_loading()
            if self.weight.abs().max() > 100:
                self.weight.data = self.weight.data.clone()

    bench = Bench(lambda: LoadingModel(Moving(), Linear()))
    large = {name: tensor * 1000 for name, tensor in bench.state(2).items()}
    session = bench.open()
    session.load(large)
    with pytest.raises(StorageChangedError, match=r"layers\.0\.weight"):
        session.finish()
    assert session.state is SessionState.POISONED


@pytest.mark.parametrize("bad", [None, "model", torch.ones(1), nn.Module])
def test_only_a_module_can_be_loaded(bad):
    with pytest.raises(UsageError, match=r"torch\.nn\.Module"):
        WeightLoadSession(bad)


def test_an_unknown_way_to_commit_is_refused():
    with pytest.raises(UsageError, match="'eventually'"):
        WeightLoadSession(nn.Linear(1, 1), commit="eventually")


# ------------------------------------------------------------------------------ poison


@pytest.mark.holds("H03")
def test_poison_stays_until_a_complete_load_finishes():
    """A further failure, an abort and an incomplete load do not make a mixture usable."""
    bench = Bench(TOYS["plain"])
    items = list(bench.state(2).items())
    session = bench.open(version=2)
    with pytest.raises(SourceError):
        session.load(failing_source(items, 1, SourceError("lost")))
    first = poison_of(bench.model)
    assert (first.session, first.version, first.step) == (session.id, 2, "load")
    assert weights_version(bench.model) is None
    bench.open().abort()
    assert poison_of(bench.model) == first
    with pytest.raises(ModelPoisonedError, match="SourceError: lost"):
        require_usable(bench.model)
    incomplete = bench.open()
    with pytest.raises(IncompleteLoadError):
        incomplete.finish()
    assert poison_of(bench.model) is not None
    bench.reload(bench.state(2), version=3)
    require_usable(bench.model)
    assert weights_version(bench.model) == 3


@pytest.mark.holds("H04")
def test_the_version_is_set_by_a_finished_load_only():
    """An abort, and a load that failed before it wrote, leave the version as it was."""
    bench = Bench(TOYS["repacked"])
    assert weights_version(bench.model) == 1
    bench.open(version=2).abort()
    assert weights_version(bench.model) == 1
    failed = bench.open(version=3)
    with pytest.raises(WeightMismatchError):
        failed.load({"layers.0.weight": torch.ones(1)})
    assert weights_version(bench.model) == 1
    bench.reload(bench.state(2), version=4)
    assert weights_version(bench.model) == 4


def test_a_framework_is_a_framework():
    """What is none would fail in the middle, and leave the model claimed."""
    with pytest.raises(UsageError, match="framework is a Framework"):
        WeightLoadSession(Linear(), framework=5)
