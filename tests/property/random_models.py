"""One example: a random model, random loads one after another, and what must hold after each."""

from unittest import mock

import attrs
from hypothesis import event, note
from hypothesis import strategies as st
from loads import (
    FAULTS,
    LOADERS_ERRORS,
    SEEN_AT_ONCE,
    TIED,
    Interrupt,
    SourceError,
    elsewhere,
    loads,
    may_miss,
    pairs_of,
    source,
)
from trees import recipes

from weightload import (
    IncompleteLoadError,
    ModelPoisonedError,
    SessionMisnestedError,
    SessionState,
    StorageChangedError,
    UnexpectedWeightError,
    WeightLoadError,
    WeightLoadSession,
    WeightMismatchError,
    poison_of,
    staging,
)
from weightload.ownership import ForwardGuard, owner_of
from weightload.testing import Bench, Kept, outputs, toy_framework
from weightload.testing.oracle import require

BUCKETS = st.sampled_from([64 << 20, 512, 0])
"""From how many bytes on layers that wait are staged in live memory."""

OPAQUE = {"handle", "weight handle", "foreign kernel"}
"""Kinds with objects that strict storage refuses to make anew."""


class NotLoaded:
    """Stands for what is known of the places of tensors before the first load has finished."""

    def check(self, model):
        """Nothing has a place yet."""


@attrs.define(eq=False)
class Subject(Bench):
    """A bench whose model need not be loaded yet.

    Attributes:
        first: the names that the first finished load brought, ``None`` before it.
        ever: the names that a finished load of everything has brought.
        tried: the names that first loads brought which failed.
        served: what the last finished load left the model with, whatever happened since.
        known: the names by which the last finished loads brought that.
        number: how many sessions there were.
    """

    first: set | None = None
    ever: set = attrs.field(factory=set)
    tried: set = attrs.field(factory=set)
    served: dict | None = None
    known: set = attrs.field(factory=set)
    number: int = 0

    def __attrs_post_init__(self):
        self.model = self.factory()
        self.framework = toy_framework()
        self.kept = NotLoaded()

    @property
    def poisoned(self):
        return poison_of(self.model) is not None

    def session_for(self, load):
        """Return the session of a load; the first ones say what the model belongs to."""
        self.number += 1
        options = {**load.options, "version": self.number}
        if self.first is None:
            options["framework"] = self.framework
        return self.session(**options)

    def finished(self, session, load):
        """Check a load that was finished."""
        self.serves = self.served = dict(load.becomes)
        part = load.scope.startswith(("only", "stays away"))
        replaced = set(TIED) if set(TIED) & load.sends.keys() else set()
        self.known = load.sends.keys() | (self.known - replaced if part else set())
        if not load.scope.startswith("only"):
            self.ever |= load.sends.keys()
        if self.first is None:
            self.first = set(load.sends)
            self.kept = Kept.of(self.model)
        self.check_finished(session)
        self.check_open_to_all()

    def ended(self, session, error, poison):
        """Check a load that was not finished; ``poison`` was there before it."""
        self.check_ended(session, error if isinstance(error, WeightLoadError) else None)
        if session.state is not SessionState.POISONED:
            require(poison_of(self.model) is poison, "an intact model changed its poison")
        if not self.poisoned:
            self.check_open_to_all()
            return
        for name, module in self.model.named_modules():
            guarded = isinstance(vars(module).get("forward"), ForwardGuard)
            require(guarded, f"{name!r} would compute with a mixture")
        try:
            outputs(self.model)
        except ModelPoisonedError:
            return
        raise AssertionError("a poisoned model computes")

    def check_open_to_all(self):
        """Check that nothing keeps the model from computing, or from a next session."""
        for name, module in self.model.named_modules():
            require("forward" not in vars(module), f"{name!r} is still guarded")
            require(owner_of(module) is None, f"{name!r} is still claimed")


def run_example(draw, coverage):
    """Draw how much may wait in memory of its own, and run an example; see :func:`_run`."""
    with mock.patch.object(staging, "BUCKET", draw(BUCKETS)):
        _run(draw, coverage)


def _run(draw, coverage):
    """Draw a model and loads, and check the model after each; the last one makes it right.

    Args:
        draw: draws from a strategy.
        coverage: counts what has happened, by group and name.
    """
    recipe = draw(recipes)
    subject = Subject(recipe)
    coverage["examples", "all"] += 1
    coverage["root", recipe.root] += 1
    for kind in recipe.kinds:
        coverage["kind", kind] += 1
    count = draw(st.integers(1, 4))
    for number in range(count + 1):
        last = number == count
        arguments = (
            recipe,
            subject.served,
            subject.known,
            subject.first,
            subject.ever,
            subject.tried,
            subject.poisoned,
        )
        outcome, load = run_load(subject, draw(loads(*arguments, last=last)))
        require(outcome == "finished" or not last, "a complete load did not make it right")
        event(f"{load.fault}: {outcome}")
        coverage["load", outcome] += 1
        coverage[f"fault: {load.fault or 'none'}", outcome] += 1
        coverage[f"scope: {load.scope}", outcome] += 1
        coverage["commit", load.options["commit"]] += 1
        coverage["verify", str(load.options["verify"])] += 1
        for names, kind in load.chunks:
            coverage["source", kind] += bool(names)


def run_load(subject, load):
    """Run one load, check what came of it, and return that in a word with the load."""
    poison, initial = poison_of(subject.model), subject.first is None
    session = subject.session_for(load)
    error = _perform(subject, session, load)
    armed = subject.framework.disarm()
    if session.state is SessionState.FINISHED:
        _check_nothing_was_wrong(subject, load, armed, poison)
        subject.finished(session, load)
        return "finished", load
    note(f"{session!r}: {type(error).__name__}: {error}")
    if error is not None or load.fault != "abort":
        _check_reason(subject, load, error, armed, poison)
    if session.state is SessionState.NEW:
        require(poison_of(subject.model) is poison, "a session that never began cured the model")
        subject.check_structure()
        return "refused, poisoned before", load
    intact = session.state is SessionState.ABORTED
    if initial:
        subject.tried |= load.sends.keys()
    else:
        _check_written_late(load, intact)
    subject.ended(session, error, poison)
    how = "aborted" if error is None else "refused"
    return f"{how}, {'intact' if intact else 'poisoned'}", load


def _perform(subject, session, load):
    """Run one load to its end, and return what ended it, if something was raised."""
    model = subject.model
    if load.fault in ("hook fails", "hook fails half way"):
        subject.framework.fail_hook(load.countdown, half_way=load.fault.endswith("way"))
    if load.fault == "hook misfits":
        subject.framework.misfit_hook(load.countdown)
    if load.fault == "loader writes outside":
        _let_store_err(model, load)
    try:
        session.prepare()
        if load.checked:
            session.check(_what_is_sent(load), complete=True)
        for number in range(len(load.chunks)):
            if load.fault == "abort" and number == load.countdown % len(load.chunks):
                session.abort()
                return None
            _load_chunk(session, load, number, model)
            if load.early is not None and load.early[0] == number:
                _process_early(session, load.early[1])
        if load.sealed:
            session.seal()
        session.finish()
    except (WeightLoadError, SourceError, Interrupt, *LOADERS_ERRORS) as error:
        return error
    finally:
        vars(model).pop("store", None)
    return None


def _what_is_sent(load):
    if load.fault is not None and FAULTS[load.fault] not in _OF_NAMES_AND_SHAPES:
        return dict(load.sends)
    return {
        name: tensor
        for number in range(len(load.chunks))
        for name, tensor in pairs_of(load, number)
    }


_OF_NAMES_AND_SHAPES = [FAULTS[fault] for fault in ("missing", "unknown", "wrong shape", "twice")]


def _load_chunk(session, load, number, model):
    sent = source(load, number, model)
    if load.nested and load.chunks[number][1] in ("iterator", "buffer"):
        sent = _tries_another(sent, model)
    if load.chunks[number][1] == "through":
        session.load_through(lambda: model.load_weights(sent), exact=True)
    else:
        session.load(sent)


def _tries_another(pairs, model):
    """Try to open a session from inside the source of another one, before the first pair."""
    try:
        WeightLoadSession(model).prepare()
    except SessionMisnestedError:
        yield from pairs
    else:
        raise AssertionError("a session was opened inside another one")


def _let_store_err(model, load):
    """Let the model's loader fill another place as well, with something else."""
    store = model.store
    places = list(elsewhere(load, model))
    other = places[load.countdown % len(places)]

    def store_twice(name, tensor):
        store(name, tensor)
        if name == load.where:
            store(other, load.becomes[other] + 1)

    model.store = store_twice


def _process_early(session, index):
    """Ask for one of the hooks of one of the modules, which may have none."""
    modules = list(session.model.modules())
    module = modules[index % len(modules)]
    call = session.finalize_attention_runtime if index % 3 == 0 else session.process_quant
    if call(module):
        require(not call(module), "a hook ran twice in one session")


def _check_nothing_was_wrong(subject, load, armed, poison):
    """Check that a load that was finished had no fault, or one that did not matter."""
    if load.fault in ("hook fails", "hook fails half way", "hook misfits"):
        require(armed, "a hook failed and nobody noticed")
    elif load.fault == "missing":
        require(may_miss(load.where), f"{load.where} was left out and not missed")
        load.becomes = {name: one for name, one in load.becomes.items() if name != load.where}
        for twin in set(TIED) & load.becomes.keys() - load.sends.keys():
            load.becomes[twin] = subject.served[twin]  # neither of the two came
    else:
        require(load.fault is None, f"{load.fault} at {load.where} went unnoticed")
    partial = load.scope.startswith("only")
    require(not (partial and poison), "a load of some names only was let on to a poisoned model")


def _check_reason(subject, load, error, armed, poison):
    """Check that there was a reason to refuse, and that the error is of the right kind."""
    allowed = set(load.excuses)
    if load.fault is not None and not (load.fault.startswith("hook") and armed):
        allowed |= set(FAULTS[load.fault])
    if load.options["strict"] and subject.factory.kinds & OPAQUE:
        allowed.add(StorageChangedError)
    if poison is not None and load.scope.startswith("only"):
        allowed.add(ModelPoisonedError)
    if load.fault in SEEN_AT_ONCE and may_miss(load.where):
        allowed.add(UnexpectedWeightError)  # of a name that is new to the model
    if subject.factory.root == "collecting" and load.scope.startswith("stays away"):
        allowed.add(IncompleteLoadError)  # nobody knows whose name it is that stays away
    if "SummedState" in repr(subject.model) and load.scope.startswith("only"):
        allowed.add(IncompleteLoadError)  # what is derived may need more than the part
    if subject.factory.root == "collecting" and load.scope.startswith("only"):
        allowed.add(UnexpectedWeightError)  # nobody knows which name fills a part of no region
    collects = (
        "through" in [kind for _, kind in load.chunks] and subject.factory.root == "collecting"
    )
    if collects and allowed & {WeightMismatchError, UnexpectedWeightError}:
        # A loader that runs on its own and collects before it writes: whose error is it?
        allowed |= set(LOADERS_ERRORS)
    require(type(error) in allowed, f"{error!r} is none of {allowed}")


def _check_written_late(load, intact):
    """Check that a reload that could know better had written nothing live when it was refused."""
    compares_again = load.options["verify"] and (load.fault or "").startswith("hook")
    if load.options["commit"] == "atomic" and not compares_again:
        require(intact, "an atomic load had written something live")
    if load.strikes_before_any_write and load.early is None:
        require(intact, f"{load.fault} in a source that was checked whole was found too late")
