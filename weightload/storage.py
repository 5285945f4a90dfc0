"""Fingerprints of live tensors, and checkpoint-format twins that stage what arrives.

A fingerprint holds the storage by strong reference: equal addresses prove nothing if the old
storage was freed in between, and address 0 is no identity.
"""

from __future__ import annotations

import functools
import itertools
import types
from collections.abc import Sequence
from typing import Any

import attrs
import torch

from weightload.errors import UnsupportedError
from weightload.ledger import Region

__all__ = [
    "NOT_QUANTIZED",
    "QUANTIZED",
    "Fingerprint",
    "Look",
    "TensorSpec",
    "describe_change",
    "extent_of",
    "inner_tensors",
    "look_of",
    "make_twins",
    "new_group",
    "rebound",
    "select",
    "storage_key",
]

Tensor = torch.Tensor
_FLATTEN = "__tensor_flatten__"
QUANTIZED = (
    "a quantized tensor of torch has scales inside that no copy of its elements brings along"
)
NOT_QUANTIZED = "Keep integers and scales in tensors of their own."
_SPARSE = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}


def storage_key(tensor: Tensor) -> int | None:
    """Return a number that all views of one storage share, or ``None`` if there is no storage.

    The number is valid as long as somebody holds the storage. Wrapper subclasses that keep their
    data in inner tensors have none.
    """
    if hasattr(type(tensor), _FLATTEN):
        return None
    try:
        key: int = tensor.untyped_storage()._cdata
        return key
    except (NotImplementedError, RuntimeError, ValueError):
        return None


def extent_of(tensor: Tensor) -> tuple[int, int]:
    """Return the first byte of a strided tensor in its storage, and the byte after the last."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = int(sum((size - 1) * step for size, step in steps)) if tensor.numel() else -1
    start = int(tensor.storage_offset()) * tensor.element_size()
    return start, start + (last + 1) * tensor.element_size()


Look = tuple[object, ...]


def look_of(tensor: Tensor) -> Look:
    """Return how a tensor looks into its storage, wherever that is."""
    nbytes = tensor.untyped_storage().nbytes()
    first = int(tensor.storage_offset())
    return nbytes, first, tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device


def inner_tensors(tensor: Tensor) -> dict[str, Tensor]:
    """Return the tensors that hold the data of ``tensor``, by name; none if it holds it itself.

    Those of a wrapper subclass are named by its ``__tensor_flatten__``; without that method they
    are its attributes. A sparse tensor has indices and values.
    """
    if hasattr(type(tensor), _FLATTEN):
        named: Any = tensor
        return {name: getattr(tensor, name) for name in named.__tensor_flatten__()[0]}
    if tensor.layout in _SPARSE:
        return {name: getattr(tensor, name)() for name in _SPARSE[tensor.layout]}
    if type(tensor) is Tensor or _backed(tensor):
        return {}
    return {name: value for name, value in vars(tensor).items() if isinstance(value, Tensor)}


def _backed(tensor: Tensor) -> bool:
    """Whether the storage of ``tensor`` is there; that of a wrapper is only a name."""
    try:
        tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError, ValueError):
        return False
    return True


@attrs.frozen(kw_only=True, repr=False)
class Fingerprint:
    """Where a live tensor is, and how it looks into its storage.

    Attributes:
        storage: the storage itself, held so that its address cannot be used again.
        address: address of the storage's first byte; 0 for an empty one.
        nbytes: size of the storage.
        offset: elements before the tensor's first one.
        shape: sizes.
        stride: strides, in elements.
        dtype: type of the elements.
        device: where the storage is.
        inner: the fingerprints of the tensors that hold the data, if it is not in the storage.
    """

    storage: torch.UntypedStorage | None
    address: int
    nbytes: int
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    inner: dict[str, Fingerprint] = attrs.field(factory=dict)

    @classmethod
    def of(cls, tensor: Tensor) -> Fingerprint:
        """Take the fingerprint of ``tensor``."""
        inner = inner_tensors(tensor)
        own = not inner and storage_key(tensor) is not None and _backed(tensor)
        storage = tensor.untyped_storage() if own else None
        backed = storage is not None and not tensor.is_meta
        return cls(
            storage=storage,
            address=storage.data_ptr() if backed and storage is not None else 0,
            nbytes=storage.nbytes() if storage is not None else 0,
            offset=int(tensor.storage_offset()) if storage is not None else 0,
            shape=tuple(tensor.shape),
            stride=tuple(tensor.stride()) if storage is not None else (),
            dtype=tensor.dtype,
            device=tensor.device,
            inner={name: cls.of(part) for name, part in inner.items()},
        )

    def difference(self, tensor: Tensor) -> str | None:
        """Say how ``tensor`` differs from the one that was fingerprinted, or return ``None``."""
        now = Fingerprint.of(tensor)
        if (self.storage is None) != (now.storage is None) or (
            self.storage is not None
            and now.storage is not None
            and self.storage._cdata != now.storage._cdata
        ):
            return "it has another storage"
        for name in ("address", "nbytes", "offset", "shape", "stride", "dtype", "device"):
            before, after = getattr(self, name), getattr(now, name)
            if before != after:
                return f"its {name} was {before} and is {after}"
        parts = inner_tensors(tensor) if self.inner or now.inner else {}
        if self.inner.keys() != parts.keys():
            return f"its inner tensors were {sorted(self.inner)} and are {sorted(parts)}"
        for name, mark in self.inner.items():
            problem = mark.difference(parts[name])
            if problem is not None:
                return f"inner tensor {name!r}: {problem}"
        return None


def describe_change(live: Tensor, new: Tensor) -> str | None:
    """Say why the value of ``new`` cannot be copied into ``live``, or return ``None``."""
    if live is not new and (live.is_quantized or new.is_quantized):
        return QUANTIZED
    for name in ("shape", "dtype", "device", "layout"):
        before, after = getattr(live, name), getattr(new, name)
        if before != after:
            return f"{name} {_short(before)} became {_short(after)}"
    if live.layout is torch.strided and live.numel():
        strides = zip(live.shape, live.stride(), new.stride(), strict=True)
        if any(before != after for size, before, after in strides if size > 1):
            return f"stride {tuple(live.stride())} became {tuple(new.stride())}"
    return None


def _short(value: object) -> str:
    return str(tuple(value)) if isinstance(value, torch.Size) else str(value)


_SELF = object()
"""Stands for the tensor itself in the attributes of a spec."""
_groups = itertools.count(1)


def new_group() -> int:
    """Return a number for a set of specs that share one storage."""
    return next(_groups)


@attrs.frozen(kw_only=True)
class TensorSpec:
    """What a tensor was in checkpoint format, enough to make one like it; holds no data.

    Attributes:
        cls: its Python type, such as a subclass of ``Parameter``.
        attributes: its instance attributes, such as ``weight_loader``.
        requires_grad: whether it asked for gradients.
        offset: elements before its first one in the storage.
        shape: sizes.
        stride: strides, in elements.
        dtype: type of the elements.
        device: where it was.
        nbytes: size of its storage.
        group: specs with one number shared one storage.
    """

    cls: type[Tensor]
    attributes: dict[str, Any]
    requires_grad: bool
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    nbytes: int
    group: int

    @property
    def look(self) -> Look:
        """How it looked into its storage; :func:`look_of` gives the size of that before it."""
        return self.offset, self.shape, self.stride, self.dtype, self.device

    @classmethod
    def of(cls, tensor: Tensor, group: int | None = None) -> TensorSpec:
        """Take the spec of ``tensor``, in a group of its own unless one is given.

        Raises:
            UnsupportedError: it is a quantized tensor of torch.
        """
        if tensor.is_quantized:
            raise UnsupportedError(
                f"A parameter or buffer of {tensor.dtype} and shape {tuple(tensor.shape)} cannot "
                f"be loaded: {QUANTIZED}. {NOT_QUANTIZED}",
                dtype=str(tensor.dtype),
            )
        return cls(
            cls=type(tensor),
            attributes={
                name: rebound(value, tensor, _SELF)
                for name, value in getattr(tensor, "__dict__", {}).items()
            },
            requires_grad=tensor.requires_grad,
            offset=int(tensor.storage_offset()),
            shape=tuple(tensor.shape),
            stride=tuple(tensor.stride()),
            dtype=tensor.dtype,
            device=tensor.device,
            nbytes=tensor.untyped_storage().nbytes(),
            group=new_group() if group is None else group,
        )


def make_twins(specs: Sequence[TensorSpec]) -> list[Tensor]:
    """Make tensors like the specs say, on storages of zero bytes.

    Specs of one group get twins that share a storage; equal ones of a group get the same twin.
    The memory comes later, by resizing the storage to the group's ``nbytes``, when the first
    write needs it.
    """
    storages: dict[int, torch.UntypedStorage] = {}
    made: dict[tuple[Any, ...], Tensor] = {}
    twins: list[Tensor] = []
    for spec in specs:
        identity = (spec.group, spec.offset, spec.shape, spec.stride, spec.dtype, spec.cls)
        if identity not in made:
            if spec.group not in storages:
                room = torch.empty(spec.nbytes, dtype=torch.uint8, device=spec.device)
                storages[spec.group] = room.untyped_storage()
            view = torch.empty(0, dtype=spec.dtype, device=spec.device)
            view.set_(storages[spec.group], spec.offset, spec.shape, spec.stride)
            made[identity] = _dress(view, spec)
        twins.append(made[identity])
    for storage in storages.values():
        storage.resize_(0)
    return twins


def _dress(data: Tensor, spec: TensorSpec) -> Tensor:
    """Give ``data`` the type and the attributes of the spec.

    Raises:
        UnsupportedError: Python cannot make an object of that type out of another one.
    """
    twin = data
    if issubclass(spec.cls, torch.nn.Parameter):
        twin = torch.nn.Parameter(data, requires_grad=spec.requires_grad)
    if type(twin) is not spec.cls:
        try:
            twin.__class__ = spec.cls
        except TypeError as error:
            raise UnsupportedError(
                f"A tensor of type {spec.cls.__qualname__} and shape {spec.shape} cannot be made "
                f"again to stage its new value ({error}). Give the class no __slots__."
            ) from error
    for name, value in spec.attributes.items():
        twin.__dict__[name] = rebound(value, _SELF, twin)
    return twin


def rebound(value: Any, old: object, new: object) -> Any:
    """Return ``value`` with bound methods of ``old`` bound to ``new`` instead.

    A loader that is a bound method of the parameter would otherwise write into the old one.
    """
    if isinstance(value, types.MethodType) and value.__self__ is old:
        return types.MethodType(value.__func__, new)
    if isinstance(value, functools.partial):
        return functools.partial(
            rebound(value.func, old, new),
            *(new if arg is old else rebound(arg, old, new) for arg in value.args),
            **{
                key: new if arg is old else rebound(arg, old, new)
                for key, arg in value.keywords.items()
            },
        )
    return value


def select(tensor: Tensor, region: Region) -> Tensor:
    """Return the view of ``tensor`` that ``region`` names."""
    return tensor.detach()[tuple(slice(*span) for span in region)] if region else tensor.detach()
