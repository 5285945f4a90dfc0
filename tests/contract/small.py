"""Models so small that every value can be worked out on paper, and what must hold after a load.

A layer names its role in a class attribute ``role``, and its hook ``process_weights_after_loading``
is run by :func:`fresh` without any session, in the order of the roles.
"""

import contextlib

import pytest
import torch
from torch import nn

from weightload import (
    Framework,
    ModuleRegistry,
    ModuleRule,
    Role,
    SessionState,
    WeightLoadError,
    WeightLoadSession,
    current_session,
    poison_of,
)
from weightload.ownership import owner_of
from weightload.testing import identical

COMMITS = ("stream", "atomic")


def number(*values, dtype=None):
    """Return the values as a tensor of one dimension."""
    return torch.tensor(values, dtype=dtype or torch.float32)


def parameter(*shape, fill=float("nan"), loader=None, dtype=None):
    """Make a parameter that holds NaN, unless something else is said."""
    made = nn.Parameter(torch.full(shape, fill, dtype=dtype), requires_grad=False)
    if loader is not None:
        made.weight_loader = loader
    return made


class Plain(nn.Module):
    """One weight that is used as it was loaded."""

    def __init__(self, size=2):
        super().__init__()
        self.weight = parameter(size)

    def forward(self, x):
        return x * self.weight


class Negated(nn.Module):
    """Its hook replaces the weight by its negative, so that a second run would undo the first."""

    role = Role.QUANT

    def __init__(self, size=2):
        super().__init__()
        self.weight = parameter(size)

    def process_weights_after_loading(self):
        self.weight = nn.Parameter(-self.weight.detach(), requires_grad=False)

    def forward(self, x):
        return x + self.weight.sum()


class Fused(nn.Module):
    """Three projections of one element in one weight; its hook negates it in place.

    What goes wrong with such layers shows as one of the elements: a shard that came twice, one
    that never came, one that was not processed.
    """

    role = Role.QUANT

    def __init__(self):
        super().__init__()
        self.weight = parameter(3, loader=self.load_shard)

    def load_shard(self, place, tensor, shard):
        place.data[shard : shard + 1].copy_(tensor)

    def process_weights_after_loading(self):
        self.weight.data.neg_()

    def forward(self, x):
        return x * self.weight[0] + self.weight[1] - self.weight[2]


class Net(nn.Module):
    """Layers in a row; a name ``layers.0.weight/1`` is shard 1 of a fused weight."""

    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

    def load_weights(self, weights):
        for name, tensor in weights:
            self.store(name, tensor)

    def store(self, name, tensor):
        name, _, shard = name.partition("/")
        places = {
            **dict(self.named_parameters(remove_duplicate=False)),
            **dict(self.named_buffers()),
        }
        place = places[name]
        loader = getattr(place, "weight_loader", None)
        if loader is not None:
            loader(place, tensor, *([int(shard)] if shard else []))
        elif place.shape == tensor.shape:
            place.data.copy_(tensor)
        else:
            raise ValueError(f"{tuple(tensor.shape)} for {tuple(place.shape)}")


def run_hook(module):
    module.process_weights_after_loading()


def framework_for(*models, **options):
    """Return a framework with a rule for every layer of these models that names its role."""
    registry = ModuleRegistry(**options)
    for model in models:
        for module in model.modules():
            for cls in type(module).__mro__:
                if "role" in vars(cls) and cls not in registry._types:
                    registry.register(cls, ModuleRule(role=cls.role, process=run_hook))
    return Framework(registry)


def fresh(factory, state):
    """Build a model, let its own loaders load ``state``, run its hooks in order: no session."""
    model = factory()
    with torch.no_grad():
        model.load_weights([(name, tensor.clone()) for name, tensor in state.items()])
        for role in (Role.QUANT, Role.ATTENTION, Role.DERIVED):
            for module in model.modules():
                if getattr(module, "role", None) is role:
                    run_hook(module)
    return model


def tensors(model):
    """Return everything that a graph may read: parameters, buffers and plain attributes."""
    found = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for prefix, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor):
                found[f"{prefix}.{name}"] = value
    return found


X = torch.tensor([1.0, 2.0])


class Live:
    """A model that has been loaded once, and where everything was then.

    Args:
        factory: makes a model without weights.
        state: the checkpoint of the first load.
        framework: if not the one that :func:`framework_for` makes.
        first: further options of the first session.
    """

    def __init__(self, factory, state, framework=None, **first):
        self.factory = factory
        self.model = factory()
        self.framework = framework or framework_for(self.model)
        with WeightLoadSession(self.model, framework=self.framework, **first) as session:
            session.load(state)
        self.receipt = session.receipt
        self.look()

    def look(self):
        """Remember where everything is, and what it holds."""
        self.held = tensors(self.model)
        self.places = {name: (t.untyped_storage(), t.data_ptr()) for name, t in self.held.items()}
        self.values = {name: tensor.detach().clone() for name, tensor in self.held.items()}

    def open(self, **options):
        session = WeightLoadSession(self.model, **options)
        session.prepare()
        return session

    def reload(self, weights, **options):
        """Load everything in one session, and return its receipt."""
        with WeightLoadSession(self.model, **options) as session:
            session.load(weights)
        self.in_place()
        return session.receipt

    def in_place(self):
        """Check that every tensor is on its old storage, has data, and nothing else is left."""
        now = tensors(self.model)
        assert now.keys() == self.held.keys()
        for name, tensor in now.items():
            storage, address = self.places[name]
            assert not tensor.is_meta, name
            assert tensor.untyped_storage()._cdata == storage._cdata, f"{name} moved"
            assert tensor.data_ptr() == address, f"{name} moved"
        assert current_session() is None
        assert all(owner_of(module) is None for module in self.model.modules())

    def equals(self, state):
        """Check that the model is what a fresh load of ``state`` gives, in the old places."""
        self.in_place()
        want = fresh(self.factory, state)
        mine, theirs = tensors(self.model), tensors(want)
        assert mine.keys() == theirs.keys()
        for name in mine:
            assert identical(mine[name], theirs[name]), f"{name}: {mine[name]}, not {theirs[name]}"
        assert identical(self.model(X), want(X))
        assert poison_of(self.model) is None

    def unchanged(self):
        """Check that every tensor holds what it held when it was last looked at."""
        self.in_place()
        for name, tensor in self.held.items():
            assert identical(tensor, self.values[name]), f"{name} was overwritten"

    @contextlib.contextmanager
    def refuses(self, expected, *names, **options):
        """Open a session, let the block fail in it, and check that what it says is true.

        Yields:
            The session. ``session.error`` is what was raised, when the block has ended.

        Args:
            expected: the class of the error, exactly.
            names: what its message must name.
            options: of the session.
        """
        session = self.open(**options)
        with pytest.raises(expected) as caught:
            yield session
        session.error = error = caught.value
        assert type(error) is expected
        assert all(name in str(error) for name in names), str(error)
        assert session.state.terminal
        intact = session.state is SessionState.ABORTED
        assert (poison_of(self.model) is None) == intact
        assert session.receipt.model_intact == intact
        if isinstance(error, WeightLoadError):
            assert error.model_intact == intact
        if intact:
            self.unchanged()
        else:
            assert options.get("commit") != "atomic", "an atomic load that fails writes nothing"
            self.in_place()
