"""What one forward pass did, done again at the same addresses: a CUDA graph for CPUs.

A captured graph knows no Python object. It knows the addresses that kernels read and wrote while
it was captured, and it keeps none of that memory alive. So a reload that rebinds, rebuilds or frees
what a kernel read does not show in eager mode, and shows here.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from weightload.testing.bench import Bench
from weightload.testing.models import Factory, State, ToyModel, make_state
from weightload.testing.oracle import (
    Kept,
    expected,
    fresh,
    identical,
    outputs,
    reload_by_hand,
    require,
)

__all__ = ["CapturedGraph", "FreedMemoryError", "check_reloads", "damage"]

Tensor = torch.Tensor


class FreedMemoryError(RuntimeError):
    """A graph was replayed that reads memory which was freed."""


@attrs.frozen(eq=False)
class _Address:
    """A tensor that the graph did not make: where it is, without keeping it alive."""

    memory: StorageWeakRef
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> _Address:
        return cls(
            StorageWeakRef(tensor.untyped_storage()),
            int(tensor.storage_offset()),
            tuple(tensor.shape),
            tensor.stride(),
            tensor.dtype,
        )

    def read(self) -> Tensor:
        """Return what is there now, whatever that is."""
        storage: Any = None
        if not self.memory.expired():
            storage = torch.UntypedStorage._new_with_weak_ptr(self.memory.cdata)
        if storage is None:
            raise FreedMemoryError(f"{self.dtype} of shape {self.shape} was freed")
        whole = torch.empty(0, dtype=self.dtype, device=storage.device)
        return whole.set_(storage, self.offset, self.shape, self.stride)


class _Recorder(TorchDispatchMode):
    """Writes down every operation that computes; views are only other looks at an address."""

    def __init__(self, given: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tape: list[tuple[Callable[..., Any], Any, Any, list[Tensor]]] = []
        self._own = {_storage(given)}
        self._kept: list[Tensor] = [given]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run one operation and write it down, one level below tensor subclasses."""
        if any(hasattr(cls, "__tensor_flatten__") for cls in types):
            return NotImplemented
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        read = {_storage(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        fresh_ones = [tensor for tensor in made if _storage(tensor) not in read]
        if func.is_view and not fresh_ones:
            return result
        self._own |= {_storage(tensor) for tensor in fresh_ones}
        self._kept += fresh_ones
        self.tape.append((func, self.noted(args), self.noted(kwargs), fresh_ones))
        return result

    def noted(self, values: Any) -> Any:
        """Return ``values`` with the address in place of every tensor that is not the graph's."""
        return tree_map(
            lambda leaf: (
                _Address.of(leaf)
                if isinstance(leaf, Tensor) and _storage(leaf) not in self._own
                else leaf
            ),
            values,
        )


def _storage(tensor: Tensor) -> int:
    key: int = tensor.untyped_storage()._cdata
    return key


class CapturedGraph:
    """One forward pass of a model, to be replayed.

    Args:
        model: what is captured, for the shape of its example.
    """

    def __init__(self, model: ToyModel) -> None:
        with torch.no_grad():
            self._input = model.example().clone()
            recorder = _Recorder(self._input)
            with recorder:
                result = torch.as_tensor(model(self._input))
        self._output = recorder.noted(result)
        self._tape = recorder.tape

    def __call__(self, x: Tensor) -> Tensor:
        """Replay with another input of the same shape.

        Raises:
            FreedMemoryError: what it reads was freed.
        """
        with torch.no_grad():
            self._input.copy_(x)
            for func, args, kwargs, made in self._tape:
                result = func(*_looked_up(args), **_looked_up(kwargs))
                new = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
                for place, value in zip(made, new, strict=False):
                    place.copy_(value)
            output: Tensor = _looked_up(self._output)
            return output.clone()


def _looked_up(values: Any) -> Any:
    return tree_map(lambda leaf: leaf.read() if isinstance(leaf, _Address) else leaf, values)


def damage(
    factory: Factory,
    *,
    before: int = 1,
    after: int = 2,
    reload: Callable[[ToyModel, State], object] = reload_by_hand,
) -> set[str]:
    """Say what a reload without a session damages.

    Args:
        factory: makes a model without weights.
        before: number of the checkpoint that is served.
        after: number of the one that is loaded.
        reload: loads it into the live model.

    Returns:
        Some of ``"error"``: it raised; ``"value"``: the model computes something else than a
        fresh one; ``"stale"``: a captured graph does; ``"freed"``: a captured graph reads memory
        that was freed.
    """
    model = fresh(factory, make_state(factory, before))
    outputs(model)  # what a forward pass makes lazily is there when a graph is captured
    graph = CapturedGraph(model)
    require(identical(graph(model.example()), outputs(model)), "the graph is another computation")
    try:
        reload(model, make_state(factory, after))
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError):
        return {"error"}
    want = expected(factory, make_state(factory, after))
    found = set() if identical(outputs(model), want) else {"value"}
    try:
        if not identical(graph(model.example()), want):
            found.add("stale")
    except FreedMemoryError:
        found.add("freed")
    return found


def check_reloads(
    factory: Factory,
    *,
    numbers: tuple[int, ...] = (2, 3, 1),
    options: Mapping[str, Any] | None = None,
) -> Bench:
    """Check that sessions keep a model and a graph captured from it right.

    Checkpoint 1 is loaded, a graph is captured, and the others are loaded one after another, with
    strict storage. After each, the model and the graph must compute, bit for bit, what a fresh
    model computes.

    Args:
        factory: makes a model without weights.
        numbers: the checkpoints to load.
        options: for the sessions.

    Returns:
        The bench, for further questions.

    Raises:
        AssertionError: something differs.
        FreedMemoryError: what the graph reads was freed.
    """
    bench = Bench(factory)
    results = [expected(factory, bench.state(number)) for number in (1, *numbers)]
    pairs = itertools.pairwise(results)
    require(not any(identical(one, two) for one, two in pairs), "equal results prove nothing")
    outputs(bench.model)
    graph, bench.kept = CapturedGraph(bench.model), Kept.of(bench.model)
    for number, want in zip(numbers, results[1:], strict=True):
        session = bench.reload(bench.state(number), strict=True, **(options or {}))
        require(identical(graph(bench.model.example()), want), "the captured graph is stale")
        receipt = session.receipt
        require(receipt is not None and not receipt.moved, f"{receipt} names what moved")
    return bench
