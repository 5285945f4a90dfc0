"""What the first processing changed is put back exactly, and nothing else is."""

import collections
import dataclasses
import types

import pytest
import torch
from torch import nn

from weightload.record import (
    MISSING,
    Contents,
    ModuleRecord,
    ObjectState,
    copy_items,
    make_record,
    record_of,
)
from weightload.recording import HookRecording, scope_of
from weightload.registry import ModuleRegistry, Role


class Thing:
    def __init__(self):
        self.kept = object()
        self.replaced = object()
        self.removed = object()
        self.table = {"a": 1, "b": 2}
        self.items = [1, 2, 3]
        self.flags = {"x"}


def change(thing):
    """Do everything that a hook does to an object."""
    thing.replaced = object()
    del thing.removed
    thing.added = object()
    thing.table["a"] = 5
    del thing.table["b"]
    thing.table["c"] = 3
    thing.items.append(4)
    thing.flags.add("y")


def attributes(thing):
    plain = (dict, list, set)
    return {
        name: value.copy() if isinstance(value, plain) else value
        for name, value in vars(thing).items()
    }


# ------------------------------------------------------------------------------ object state


def test_restore_puts_everything_back_into_the_same_containers():
    thing = Thing()
    before, table = attributes(thing), thing.table
    state = ObjectState.of(thing)
    change(thing)
    state.restore()
    assert attributes(thing) == before
    assert thing.table is table


def test_restore_puts_a_replaced_container_back():
    thing = Thing()
    before, items = attributes(thing), thing.items
    state = ObjectState.of(thing)
    thing.items.clear()
    thing.items = [7]
    state.restore()
    assert attributes(thing) == before
    assert thing.items is items


def test_differences_name_exactly_what_changed_with_the_values_from_before():
    thing = Thing()
    replaced, removed = thing.replaced, thing.removed
    state = ObjectState.of(thing)
    change(thing)
    found = state.differences(ObjectState.of(thing))
    assert found.attributes == {"replaced": replaced, "removed": removed, "added": MISSING}
    assert found.entries == {"table": {"a": 1, "b": 2, "c": MISSING}}
    assert found.contents == {"items": [1, 2, 3], "flags": {"x"}}
    assert found.owner is thing


def test_no_change_is_none():
    thing = Thing()
    assert ObjectState.of(thing).differences(ObjectState.of(thing)) is None


def test_equal_values_that_are_other_objects_count_as_changed():
    """A hook may have replaced a tensor by an equal one: identity is what counts."""
    thing = Thing()
    thing.items = [torch.zeros(1)]
    state = ObjectState.of(thing)
    thing.items[0] = torch.zeros(1)
    assert "items" in state.differences(ObjectState.of(thing)).contents


def test_undo_leaves_alone_what_was_bound_later():
    """A cache that the engine binds after the first load is not the hook's."""
    thing = Thing()
    before = attributes(thing)
    state = ObjectState.of(thing)
    change(thing)
    found = state.differences(ObjectState.of(thing))
    thing.cache = "bound later"
    thing.table["later"] = "bound later"
    found.undo({})
    assert vars(thing).pop("cache") == "bound later"
    assert thing.table.pop("later") == "bound later"
    assert attributes(thing) == before


def test_the_record_itself_is_no_part_of_the_state():
    module = nn.Linear(1, 1)
    state = ObjectState.of(module)
    record = make_record(module)
    state.restore()
    assert record_of(module) is record
    assert state.differences(ObjectState.of(module)) is None


# ------------------------------------------------------------------------------ recording


def record(module, hook, role=Role.QUANT):
    """Record one run of a hook, as a first load does, and return the slots it changed."""
    recording = HookRecording.start(
        scope_of(module, ModuleRegistry()), lambda slot: [], lambda tensor: None
    )
    versions = {id(tensor): tensor._version for tensor in module.parameters()}
    hook(module)
    written = {
        tensor.untyped_storage()._cdata: None
        for tensor in module.parameters()
        if versions.get(id(tensor), tensor._version) != tensor._version
    }
    touched = recording.finish(module, role, written, {})
    return {(section, name) for _, section, name in touched}


def layer():
    return nn.Linear(3, 2).requires_grad_(False)


def test_a_replaced_parameter_is_to_be_staged():
    module = layer()

    def hook(module):
        module.weight = nn.Parameter(module.weight.t().contiguous(), requires_grad=False)

    assert record(module, hook) == {("_parameters", "weight")}
    staged = record_of(module).staged["_parameters", "weight"]
    assert staged.spec.shape == (2, 3)


def test_a_parameter_that_was_written_in_place_is_to_be_staged():
    module = layer()
    assert record(module, lambda module: module.weight.mul_(2)) == {("_parameters", "weight")}


def test_a_parameter_whose_data_was_rebound_is_to_be_staged():
    module = layer()

    def hook(module):
        module.bias.data = module.bias.data.double()

    assert record(module, hook) == {("_parameters", "bias")}
    assert record_of(module).staged["_parameters", "bias"].spec.dtype is torch.float32


def test_a_removed_parameter_is_to_be_staged():
    module = layer()

    def hook(module):
        del module.bias

    assert record(module, hook) == {("_parameters", "bias")}


def test_a_new_parameter_is_undone_and_not_staged():
    module = layer()

    def hook(module):
        module.scale = nn.Parameter(torch.ones(1))

    assert record(module, hook) == set()
    [change] = record_of(module).steps[Role.QUANT]
    change.undo({})
    assert not hasattr(module, "scale")


def test_a_hook_that_only_reads_leaves_nothing_to_undo():
    module = layer()
    assert record(module, lambda module: module.weight.sum()) == set()
    assert record_of(module).steps[Role.QUANT] == []


def test_no_old_weight_is_kept_alive_by_the_record():
    """A record that held the checkpoint's tensors would double the memory of the model."""
    import gc
    import weakref

    module = layer()
    old = weakref.ref(module.weight)

    def hook(module):
        module.weight = nn.Parameter(torch.zeros(1), requires_grad=False)

    record(module, hook)
    gc.collect()
    assert old() is None


def test_a_failed_hook_is_undone():
    """Attributes, replaced parameters and rebound data are as before the hook."""
    module = layer()
    weight, bias, storage = module.weight, module.bias, module.bias.untyped_storage()
    recording = HookRecording.start(
        scope_of(module, ModuleRegistry()), lambda slot: [], lambda tensor: None
    )
    module.kernel = object()
    module.weight = nn.Parameter(torch.zeros(1))
    module.bias.data = module.bias.data.double()
    recording.undo({})
    assert not hasattr(module, "kernel")
    assert module.weight is weight
    assert module.bias is bias
    assert module.bias.dtype is torch.float32
    assert module.bias.untyped_storage()._cdata == storage._cdata


# ------------------------------------------------------------------------------ scope


class Method:
    def process_weights_after_loading(self, layer):
        return None


def test_the_scope_is_the_tree_with_its_strategy_objects_at_any_depth():
    module = nn.Sequential(layer())
    scheme, inner = Method(), Method()
    module[0].quant_method = scheme
    scheme.kernel = inner
    module[0].config = Thing()
    module[0].other = nn.Linear(1, 1)
    scope = scope_of(module, ModuleRegistry())
    assert {id(one) for one in scope} == {
        id(one) for one in (module, module[0], module[0].other, scheme, inner)
    }


def test_a_strategy_is_found_by_its_name_or_by_its_hook():
    module = layer()
    module.scheme, module.impl = Thing(), Method()
    scope = scope_of(module, ModuleRegistry(strategies=("scheme",)))
    assert module.scheme in scope
    assert module.impl in scope
    assert module.scheme not in scope_of(module, ModuleRegistry())


@dataclasses.dataclass
class Config:
    inner: object = None


def test_what_holds_values_is_in_the_scope_once():
    """A container in a container that holds the outer one; a dataclass, but not one inside it."""
    module = layer()
    inner, table = [], collections.OrderedDict()
    module.plain = {"inner": inner}
    module.plain["self"] = module.plain
    module.table, module.pair = table, (inner, types.SimpleNamespace())
    module.config = Config(Config())
    scope = scope_of(module, ModuleRegistry())
    held = [one.items for one in scope if isinstance(one, Contents)]
    assert sorted(map(id, held)) == sorted(map(id, (inner, table)))
    rest = [one for one in scope if not isinstance(one, Contents)]
    assert sorted(map(id, rest)) == sorted(map(id, (module, module.pair[1], module.config)))


def test_deep_and_large_containers_are_not_searched():
    """The time for a layer is bounded, whatever hangs on it."""
    module = layer()
    module.deep = []
    for _ in range(50):
        module.deep = [module.deep]
    module.large = [{} for _ in range(100_000)]
    assert len(scope_of(module, ModuleRegistry())) < 10


def test_those_who_share_a_container_share_what_stands_for_it():
    """Else nobody would know that the hook of one finds what that of the other left."""
    one, two = layer(), layer()
    one.shared = two.shared = collections.deque()
    for module in (one, two):
        record(module, lambda module: module.shared.append(1))
    assert record_of(one).strategies == record_of(two).strategies != []


# ------------------------------------------------------------------------------ containers


class Loud(dict):
    """A dict that does not let everybody write to it."""

    def __setitem__(self, key, value):
        raise TypeError("it is closed")

    update = clear = pop = __setitem__


class Names(set):
    pass


@pytest.mark.parametrize(
    "container",
    [
        collections.OrderedDict(b=1, a=2),
        collections.defaultdict(list, a=1),
        collections.deque([1, 2], maxlen=2),
        Loud(a=1),
        Names("ab"),
    ],
    ids=lambda one: type(one).__name__,
)
def test_a_container_of_any_class_is_put_back(container):
    """In the order of then, with its own class, and whatever its methods do."""
    state, before = ObjectState.of(Contents.of(container, "here")), list(container)
    if isinstance(container, dict):
        kind = collections.OrderedDict if hasattr(container, "move_to_end") else dict
        kind.__setitem__(container, "c", 3)
    else:
        (container.add if isinstance(container, set) else container.append)("c")
    after, change = list(container), state.differences(ObjectState.of(state.owner))
    later = ObjectState.of(state.owner)
    change.undo({})
    assert list(container) == before
    later.restore()
    assert list(container) == after
    state.restore()
    assert list(container) == before
    assert not state.differences(ObjectState.of(state.owner))


def test_the_copy_of_a_container_is_plain_and_in_its_order():
    table = collections.OrderedDict(b=1, a=2)
    table.move_to_end("b")
    assert [*copy_items(table)] == ["a", "b"]
    assert type(copy_items(table)) is dict
    assert copy_items(collections.deque([1])) == [1]


def test_another_class_is_undone():
    class Other(Thing):
        pass

    thing = Thing()
    state = ObjectState.of(thing)
    thing.__class__ = Other
    change = state.differences(ObjectState.of(thing))
    change.undo({})
    assert type(thing) is Thing
    thing.__class__ = Other
    assert not state.holds_but_for(())
    state.restore()
    assert type(thing) is Thing


# ------------------------------------------------------------------------------ copies


@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_a_copied_module_says_that_it_is_a_copy(way):
    """The record's objects belong to the original; a copy must not undo things with them."""
    import copy
    import pickle

    module = layer()
    make_record(module).keepalive = [torch.zeros(1)]
    twin = copy.deepcopy(module) if way == "deepcopy" else pickle.loads(pickle.dumps(module))
    assert record_of(twin) == ModuleRecord(copied=True)
    assert not record_of(module).copied
