"""Random loads of one model: what comes, in which order, through which source, and what is wrong."""

import random

import attrs
import torch
from hypothesis import strategies as st
from trees import is_optional, islands, names_of, optional_shapes, optional_value

from weightload import (
    DuplicateWeightError,
    IncompleteLoadError,
    ProcessingError,
    Scope,
    SessionMisnestedError,
    StorageChangedError,
    UnexpectedWeightError,
    UnsupportedError,
    UsageError,
    WeightLoadSession,
    WeightMismatchError,
)
from weightload.framework import load_into
from weightload.testing import CollectingModel, make_state
from weightload.testing.loading import ScatteredLinear
from weightload.testing.sharing import PackedHead, TableLinear


class SourceError(Exception):
    """What a source raises."""


LOADERS_ERRORS = (ValueError, RuntimeError, KeyError, AttributeError)
"""What loaders of toys raise, which reaches the caller where nobody knows that a loader did."""


class Interrupt(BaseException):
    """What a source is interrupted by, as by a key."""


FAULTS = {
    "missing": (IncompleteLoadError,),
    "twice": (DuplicateWeightError,),
    "twice, the second time later": (DuplicateWeightError,),
    "unknown": (UnexpectedWeightError, WeightMismatchError),
    "wrong shape": (WeightMismatchError,),
    "broadcastable shape": (WeightMismatchError,),
    "oversized": (WeightMismatchError,),
    "wrong dtype": (WeightMismatchError,),
    "not finite": (WeightMismatchError,),
    "source raises": (SourceError,),
    "source is interrupted": (Interrupt,),
    "another session inside": (SessionMisnestedError,),
    "loader writes outside": (
        DuplicateWeightError,
        UnexpectedWeightError,
        UnsupportedError,
        WeightMismatchError,
    ),
    "hook fails": (ProcessingError,),
    "hook fails half way": (ProcessingError,),
    "hook misfits": (StorageChangedError, ProcessingError),
    "abort": (),
}
"""What may be wrong with a load, and the errors that may say so."""

SEEN_AT_ONCE = {
    "twice",
    "unknown",
    "wrong shape",
    "broadcastable shape",
    "oversized",
    "wrong dtype",
    "not finite",
}
"""What is found before anything is written, if a source can be checked as a whole."""

RARE = ("hook misfits", "loader writes outside", "oversized", "wrong dtype")
"""Faults that few loads can have, so that those have them more often."""

LAZY = {"source raises", "source is interrupted", "another session inside"}
"""Faults of a source that is read while it is iterated."""

TIED = ("embedding.weight", "head.weight")
"""What checkpoints of a tied model may bring under one name or under both, with equal values."""

SOURCES = ("mapping", "list", "iterator", "buffer", "through")
SCOPES = ("full", "only", "only at random", "stays away", "stays away at random", "unexpected")


@attrs.define(kw_only=True, repr=False)
class Load:
    """One load, completely decided.

    Attributes:
        sends: what is sent, in this order, before the fault is built in.
        becomes: what the model holds if the load finishes, as the checkpoint of a fresh load.
        chunks: names and kind of source of each call of ``load``.
        scope: a key of ``SCOPES``.
        options: of the session.
        fault: a key of ``FAULTS``, or ``None``.
        where: the name at which the fault is, whose tensor has elements, if one has.
        countdown: the number of hooks, or of places, before the fault.
        checked: whether ``check`` is called before.
        sealed: whether ``seal`` is called before ``finish``.
        early: after which chunk which module is processed, or ``None``.
        nested: whether the source tries to open another session, and takes the refusal.
        excuses: errors that may be raised although nothing is wrong with the weights.
    """

    sends: dict
    becomes: dict
    chunks: list
    scope: str
    options: dict
    fault: str | None
    where: str
    countdown: int
    checked: bool
    sealed: bool
    early: tuple | None
    nested: bool
    excuses: set

    def _repr_pretty_(self, printer, cycle):
        """Say everything but the values of tensors."""
        facts = attrs.asdict(self, filter=lambda field, _: field.name != "becomes", recurse=False)
        facts["sends"] = {name: (tuple(one.shape), one.dtype) for name, one in self.sends.items()}
        printer.text("Load(" + "".join(f"\n    {k}={v!r}," for k, v in facts.items()) + ")")

    @property
    def strikes_before_any_write(self):
        """Whether the fault is found in a source that is checked whole, the first to come."""
        first = next((chunk for chunk in self.chunks if chunk[0]), None)
        return (
            self.fault in SEEN_AT_ONCE
            and first is not None
            and self.where in first[0]
            and first[1] in ("mapping", "list")
        )


def together(old, new):
    """Return the checkpoint of a model in which some tensors of ``old`` became those of ``new``."""
    mixture = {**old, **new}
    if all(name in mixture for name in TIED):
        for name in TIED:
            if name in new:
                mixture.update(dict.fromkeys(TIED, new[name]))
    return mixture


@st.composite
def loads(draw, factory, served, known, first, ever, tried, poisoned, *, last=False):
    """Return a random load.

    Args:
        factory: makes the model without weights.
        served: what the last finished load left the model with; ``None`` before the first.
        known: the names by which the last finished loads brought that.
        first: the names that the first finished load brought, ``None`` before it.
        ever: the names that a finished load of everything has brought.
        tried: the names that first loads brought which failed.
        poisoned: whether the model is poisoned.
        last: whether it is to be complete and right, so that nothing excuses a refusal.
    """
    model, initial = factory(), first is None
    state = make_state(factory, draw(st.integers(1, 4)))
    for name, shape in optional_shapes(model).items():
        if name in (tried if initial else first) if last else draw(st.booleans()):
            state[name] = optional_value(shape, draw(st.sampled_from([0.25, 3.0])))
    names = list(state)
    order = draw(st.sampled_from(["as it is", "reversed", "shuffled", "shuffled"]))
    if order == "reversed":
        names.reverse()
    if order == "shuffled":
        random.Random(draw(st.integers(0, 10_000))).shuffle(names)

    scope, promised, excuses, late = "full", Scope.full(), set(), set()
    if initial:
        promised = Scope.full(allow_missing=model.may_miss)
        if any(is_optional(name) and name not in state for name in tried):
            excuses.add(IncompleteLoadError)  # its default was overwritten
    elif not last:
        scope = draw(st.sampled_from(["full", "full", "full", *SCOPES]))
    becomes = state
    if scope.startswith("only"):
        part = _part(draw, model, served, at_random=scope.endswith("random"))
        names = [name for name in names if name in part]
        names += [name for name in part if name not in names]
        state = {name: state.get(name, served[name]) for name in names}
        promised = Scope.only(names)
        becomes = together(served, state)
        if any(name in TIED and name not in known for name in part):
            excuses.add(UnexpectedWeightError)  # the model knows it by the other name
        if scope == "only at random" or model.__class__.__name__ == "CollectingModel":
            excuses |= {IncompleteLoadError, UnsupportedError}
    elif scope.startswith("stays away"):
        part = _part(draw, model, state, at_random=scope.endswith("random"))
        promised = Scope.full(allow_missing=part)
        kept = {name: served[name] for name in part if served is not None and name in served}
        names = [name for name in names if name not in part]
        state = {name: state[name] for name in names}
        becomes = together(kept, state)
        resets = served is not None and any(is_optional(n) and n not in state for n in served)
        if scope == "stays away at random" or poisoned or resets:
            excuses.add(IncompleteLoadError)
    elif scope == "unexpected":
        promised = Scope.full(allow_unexpected=["*.unexpected"])
    if first is not None and not scope.startswith("only"):
        brought = {name for name in first if is_optional(name)}
        brings = {name for name in state if is_optional(name)}
        if brought - brings:
            excuses.add(IncompleteLoadError)
        if brings - ever:
            # Nobody waits, while a stream is read, for what has never come.
            late |= {DuplicateWeightError, UnexpectedWeightError}
            if isinstance(model, CollectingModel):
                late.add(WeightMismatchError)  # nobody knows whose place is gone

    cuts = sorted(draw(st.lists(st.integers(0, len(names)), max_size=3)))
    allowed = SOURCES if hasattr(model, "load_weights") else SOURCES[:-1]
    chunks = [
        (names[a:b], draw(st.sampled_from(allowed)))
        for a, b in zip([0, *cuts], [*cuts, len(names)], strict=True)
    ]
    load = Load(
        sends={name: state[name] for name in names},
        becomes=becomes,
        chunks=chunks,
        scope=scope,
        options={
            "commit": draw(st.sampled_from(["stream", "atomic"])),
            "scope": promised,
            "verify": draw(st.sampled_from([None, None, None, "sampled", "full"])),
            "check_finite": draw(st.booleans()),
            "strict": None if last else draw(st.sampled_from([None, None, True])),
            "plans": draw(st.booleans()),
        },
        fault=None,
        where=draw(st.sampled_from([name for name in names if state[name].numel()] or [""])),
        countdown=draw(st.sampled_from([0, 0, 0, 0, 1, 1, 1, 2, 2, 3, 4, 5, 6])),
        checked=draw(st.sampled_from([False, False, True])),
        sealed=draw(st.booleans()),
        early=None,
        nested=draw(st.sampled_from([False] * 5 + [True])),
        excuses=excuses,
    )
    if load.options["commit"] == "stream":
        load.excuses |= late
    if last or not load.where:
        return load
    _widen(draw, load)
    # In another order than the tree's, hooks of what is shared give what no fresh load gives.
    shared = any(isinstance(one, PackedHead | TableLinear) for one in model.layers.modules())
    if not (initial and shared) and draw(st.sampled_from([False] * 4 + [True])):
        load.early = (draw(st.integers(0, len(chunks) - 1)), draw(st.integers(0, 20)))
        load.excuses |= {IncompleteLoadError, UsageError}
        if any(name.endswith(".scale") for name in load.sends):
            load.excuses.add(UnexpectedWeightError)  # the hook has taken its place away
        if initial:  # which does not know yet what all comes
            load.excuses |= {DuplicateWeightError, UnexpectedWeightError, WeightMismatchError}
    if draw(st.booleans()):
        _break(draw, load, model, initial)
    return load


def _part(draw, model, names, *, at_random):
    """Return some names: all of whole islands, or any."""
    names = sorted(names)
    if at_random:
        return draw(st.lists(st.sampled_from(names), min_size=1, unique=True, max_size=6))
    parts = [part for part in (names_of(one, names) for one in islands(model)) if part]
    chosen = draw(st.lists(st.sampled_from(parts), min_size=1, max_size=2))
    return sorted({name for part in chosen for name in part})


def _widen(draw, load):
    """Let one tensor come as another wide float, which is no fault."""
    dtype = draw(st.sampled_from([None] * 5 + [torch.float64, torch.bfloat16]))
    if dtype is not None and load.where not in TIED:
        tensor = load.sends[load.where].to(dtype)
        load.sends[load.where] = tensor
        load.becomes = together(load.becomes, {load.where: tensor})
        load.excuses.add(WeightMismatchError)  # of a loader that looks at bytes


def _break(draw, load, model, initial):
    """Build a fault in, if it can be one in this load."""
    # In a model that collects first, nobody knows which name a rogue write belongs to.
    stores = hasattr(model, "store") and not isinstance(model, CollectingModel)
    stores = stores and list(elsewhere(load, model))
    possible = [
        fault
        for fault in sorted(FAULTS)
        if not (initial and not _is_fault_of_a_first_load(fault, load, model))
        and (stores or fault != "loader writes outside")
    ]
    fault = draw(st.sampled_from(possible + [one for one in possible if one in RARE] * 3))
    if fault == "not finite":
        load.options["check_finite"] = True
    if fault == "loader writes outside":
        load.options["plans"] = False  # or it is not asked
    load.fault = fault
    if fault in LAZY:
        load.nested = False
        kinds = ["iterator", "buffer"]
        load.chunks = [
            (names, kind if kind in kinds else draw(st.sampled_from(kinds)))
            for names, kind in load.chunks
        ]


def _is_fault_of_a_first_load(fault, load, model):
    """Whether the model's own loaders can know that something is wrong."""
    if fault in ("hook misfits", "loader writes outside"):
        return False
    if fault.startswith("hook") and any(
        isinstance(one, PackedHead) for one in model.layers.modules()
    ):
        return False  # what a failed hook has untied is not tied again
    if fault == "missing":
        return not may_miss(load.where) and "/" not in load.where and ".mean" not in load.where
    if fault in SEEN_AT_ONCE - {"twice", "unknown", "not finite"}:
        sent = {**load.sends, load.where: _spoiled(fault, load.sends[load.where])}
        return _refused_by_loaders(model, sent)
    return True


def _refused_by_loaders(model, state):
    try:
        with torch.no_grad():
            if hasattr(model, "load_weights"):
                model.load_weights(list(state.items()))
            else:
                load_into(model, state.items())
    except Exception:
        return True
    return False


def may_miss(name):
    """Whether a model can be right without that tensor of a checkpoint."""
    return is_optional(name) or name in TIED


def elsewhere(load, model):
    """Yield names whose places a loader could fill by mistake, and be found out.

    What a loader compares with the value that is there cannot be told from what belongs there, and
    of two names that fill no plain regions of one tensor nobody knows which part is whose.
    """
    stem, _, shard = load.where.partition("/")
    owner = model.get_submodule(stem.rpartition(".")[0]) if shard else None
    scattered = isinstance(owner, ScatteredLinear)
    for name in load.becomes if load.scope.startswith("only") else load.sends:
        looked_at = ".largest" in name or ".checked" in name
        together = scattered and name.startswith(f"{stem}/")
        nothing = not load.becomes[name].numel()
        if name != load.where and not (looked_at or together or nothing or may_miss(name)):
            yield name


def _spoiled(fault, tensor):
    """Return a tensor with something wrong."""
    tensor = tensor.clone()
    if fault == "wrong shape":
        return tensor.reshape(-1, 1, 1)
    if fault == "broadcastable shape":
        return tensor[:1] if tensor.ndim and len(tensor) > 1 else tensor.reshape(1, 1, 1)
    if fault == "oversized":
        return torch.cat([tensor.reshape(-1), tensor.reshape(-1)])
    if fault == "wrong dtype":
        return (tensor * 10).to(torch.int32)
    if fault == "not finite":
        tensor.reshape(-1)[-1] = float("nan") if tensor.numel() % 2 else float("inf")
    return tensor


def pairs_of(load, number, *, names=None, model=None):
    """Yield what one chunk sends, with the fault of the load built in."""
    last = number == len(load.chunks) - 1
    for name in load.chunks[number][0] if names is None else names:
        tensor = load.sends[name].clone()
        fault = load.fault if name == load.where else None
        if fault == "missing":
            continue
        if fault == "source raises":
            raise SourceError
        if fault == "source is interrupted":
            raise Interrupt
        if fault == "another session inside":
            WeightLoadSession(model).prepare()
        if fault == "unknown":
            yield f"{name}.nowhere", tensor
        if load.scope == "unexpected" and name == load.where:
            yield f"{name}.unexpected", torch.ones(3)
        yield name, _spoiled(fault, tensor)
        if fault == "twice":
            yield name, tensor
    if last and load.fault == "twice, the second time later":
        yield load.where, load.sends[load.where].clone()


def source(load, number, model):
    """Return the source of one chunk."""
    kind = load.chunks[number][1]
    pairs = pairs_of(load, number, model=model)
    repeats = load.fault in ("twice", "twice, the second time later")
    if kind == "mapping" and not repeats:
        return dict(pairs)
    if kind in ("mapping", "list"):
        return list(pairs)
    return overwriting(pairs) if kind == "buffer" else pairs


def overwriting(pairs):
    """Yield each tensor as a view of one buffer that the next one overwrites."""
    buffers = {}
    for name, tensor in pairs:
        buffer = buffers.setdefault(tensor.dtype, torch.empty(4096, dtype=tensor.dtype))
        yield name, buffer[: tensor.numel()].view(tensor.shape).copy_(tensor)
        buffer.fill_(float("nan") if tensor.is_floating_point() else -1)
