"""Random module trees, as recipes: plain data that models without weights are made of."""

from functools import partial

import attrs
import torch
from hypothesis import strategies as st
from torch import nn

from weightload.testing import (
    BareModel,
    CollectingModel,
    LoadingModel,
    TiedModel,
    ToyModel,
    kernels,
    layers,
    loading,
    sharing,
)
from weightload.testing.layers import WIDTH

KINDS = {
    "linear": layers.Linear,
    "repacked": layers.RepackedLinear,
    "in place": layers.InPlaceLinear,
    "rooms": layers.RoomLinear,
    "fused": loading.FusedLinear,
    "hollow": loading.HollowLinear,
    "padded": loading.PaddedLinear,
    "padded, not packed": partial(loading.PaddedLinear, packed=False),
    "default scale": layers.DefaultScaleLinear,
    "kept scale": layers.KeptScaleLinear,
    "attention": sharing.LatentAttention,
    "kernel": layers.KernelLinear,
    "rebuilt kernel": kernels.RebuiltKernelLinear,
    "rebound bias": layers.FloatBiasLinear,
    "buffers": layers.BufferedLayer,
    "experts": loading.ExpertStack,
    "packed experts": loading.PackedStack,
    "pieced experts": loading.PiecedStack,
    "experts in blocks": partial(kernels.BlockExperts, 8),
    "experts with halves swapped": partial(kernels.BlockExperts, 4),
    "composed loader": loading.ComposedLoaderLinear,
    "interleaved": loading.InterleavedLinear,
    "interleaved, packed": partial(loading.InterleavedLinear, packed=True),
    "handle": sharing.HandleLinear,
    "weight handle": sharing.WeightHandleLinear,
    "foreign kernel": sharing.ForeignLinear,
    "filled attribute": layers.FilledScaleLinear,
    "sinks": sharing.SinkAttention,
    "loaders that look": partial(loading.ScaledLinear, packed=False),
    "loaders that look, packed": partial(loading.ScaledLinear, packed=True),
    "scattered": partial(loading.ScatteredLinear, packed=False),
    "scattered, packed": partial(loading.ScatteredLinear, packed=True),
    "hook over children": sharing.FusedExperts,
}
"""How to make a layer of each kind that stands for itself."""

REFERRING = ("again", "tied head", "sum")
"""A layer from before once more; an output layer that shares its weight; one derived from it."""

TABLE = "table"
"""A layer whose strategy object, with the table in it, is shared by all of its kind."""

ROOTS = {
    "loaders": LoadingModel,
    "collecting": CollectingModel,
    "tied": TiedModel,
    "tied, both names": partial(TiedModel, twice=True),
    "by name": ToyModel,
    "bare copies": BareModel,
}


def _loaded_whole(kind):
    """Whether a kind can do without the loaders of its parameters."""
    made = KINDS[kind]()
    return not any(hasattr(place, "weight_loader") for place in made.parameters())


_WHOLE = [kind for kind in KINDS if _loaded_whole(kind)]
_ALLOWED = {"by name": _WHOLE, "bare copies": [kind for kind in _WHOLE if kind != "buffers"]}


@attrs.frozen
class Recipe:
    """What a model is made of.

    Attributes:
        root: a key of ``ROOTS``.
        tree: kinds; a list is a nested module, a pair refers to a layer from before.
    """

    root: str
    tree: list

    def __call__(self):
        """Make the model, without weights."""
        method, grown = sharing.SharedTableMethod(), []

        def grow(node):
            if isinstance(node, list):
                return nn.Sequential(*map(grow, node))
            made = _refer(*node, grown) if isinstance(node, tuple) else _make(node, method)
            grown.append(made)
            return made

        return ROOTS[self.root](*[grow(node) for node in self.tree])

    @property
    def kinds(self):
        """The set of all kinds in the tree."""

        def leaves(node):
            for inner in node:
                if isinstance(inner, list):
                    yield from leaves(inner)
                else:
                    yield inner[0] if isinstance(inner, tuple) else inner

        return set(leaves(self.tree))


def _make(kind, method):
    return sharing.TableLinear(method) if kind == TABLE else KINDS[kind]()


def _refer(how, index, grown):
    """Make a layer that refers to one that was made before, or a plain one if none fits."""
    fitting = [layer for layer in grown if how == "again" or _has_square_weight(layer)]
    if not fitting:
        return layers.Linear()
    other = fitting[index % len(fitting)]
    if how == "tied head":
        return sharing.PackedHead(other.weight)
    return other if how == "again" else sharing.SummedState(other)


def _has_square_weight(layer):
    weight = layer._parameters.get("weight")
    return weight is not None and weight.shape == (WIDTH, WIDTH)


def _trees(root):
    alone = st.sampled_from([*_ALLOWED.get(root, KINDS), TABLE])
    referring = st.tuples(st.sampled_from(REFERRING), st.integers(0, 5))
    return st.recursive(
        alone | alone | alone | referring,
        lambda inner: st.lists(inner, min_size=1, max_size=3),
        max_leaves=6,
    ).map(lambda tree: tree if isinstance(tree, list) else [tree])


recipes = st.sampled_from(sorted(ROOTS)).flatmap(
    lambda root: st.builds(Recipe, st.just(root), _trees(root))
)


def optional_shapes(model):
    """Return name and shape of what a checkpoint may bring or leave to its default."""
    shapes = {}
    for prefix, module in model.named_modules():
        if isinstance(module, layers.DefaultScaleLinear | layers.KeptScaleLinear):
            shapes[f"{prefix}.scale"] = (1,)
        if isinstance(module, layers.BufferedLayer):
            shapes[f"{prefix}.temperature"] = ()
    return shapes


def is_optional(name):
    """Whether a model is right without the tensor of that name, which has a default then."""
    return name.endswith((".scale", ".temperature"))


def islands(model):
    """Return the parts of a model that share nothing with one another, as tuples of prefixes.

    Shared may be modules, parameters and strategy objects; a layer that is derived from another
    one belongs to it.
    """
    parts = {f"layers.{number}": layer for number, layer in enumerate(model.layers)}
    parts |= {name: child for name, child in model.named_children() if name != "layers"}
    found = []
    for prefix, part in parts.items():
        prefixes, known = (prefix,), set()
        for module in part.modules():
            known |= {id(module), id(getattr(module, "quant_method", module))}
            known |= {id(place) for place in module.parameters(recurse=False)}
            known |= {id(inner) for other in getattr(module, "others", ()) for inner in _of(other)}
        for other in [one for one in found if one[1] & known]:
            found.remove(other)
            prefixes, known = other[0] + prefixes, other[1] | known
        found.append((prefixes, known))
    return [prefixes for prefixes, _ in found]


def _of(module):
    return [*module.modules(), *module.parameters()]


def names_of(island, names):
    """Return those of the names that belong to one island."""
    return [name for name in names if any(name.startswith(f"{part}.") for part in island)]


def optional_value(shape, value):
    """Return what a checkpoint brings for an optional name."""
    return torch.full(shape, value)
