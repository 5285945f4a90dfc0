"""The writes of one load as plain data: which part of which source goes where.

A plan holds no tensor and no module, needs no torch, pickles, and is JSON by ``to_plain``. Everything
in it is a strided view: offset, shape and strides in elements, over a contiguous tensor in the case of
a source, over the tensor that loaders see in the case of a target.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import attrs

from weightload.errors import UsageError

__all__ = ["FORMAT", "Form", "Plan", "View", "Write"]

FORMAT = 1
"""Number of the layout that ``to_plain`` gives."""


@attrs.frozen(kw_only=True)
class View:
    """A part of a tensor.

    Attributes:
        offset: elements before the first one.
        shape: sizes.
        stride: strides, in elements.
        dtype: name of the type that its elements are seen as, such as ``"bfloat16"``.
    """

    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str


@attrs.frozen(kw_only=True)
class Form:
    """What a whole tensor is.

    Attributes:
        shape: sizes.
        stride: strides, in elements; of a source those of a contiguous tensor.
        dtype: name of its type.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str

    @classmethod
    def contiguous(cls, shape: tuple[int, ...], dtype: str) -> Form:
        """Return the form of a contiguous tensor."""
        stride: list[int] = []
        step = 1
        for size in reversed(shape):
            stride.insert(0, step)
            step *= max(size, 1)
        return cls(shape=shape, stride=tuple(stride), dtype=dtype)

    @property
    def whole(self) -> View:
        """The view of everything."""
        return View(offset=0, shape=self.shape, stride=self.stride, dtype=self.dtype)


@attrs.frozen(kw_only=True)
class Write:
    """One copy: a part of a source into a part of a parameter or buffer, of the same shape.

    Or a number that a loader puts where the source brings nothing, such as zeros for padding.

    Attributes:
        source: what is read; ``None`` if it is a number.
        module: qualified name of the module that holds the target.
        tensor: name of the parameter or buffer in that module.
        target: what is written, in checkpoint format; another type than that of the source means
            that values are cast.
        value: the number, if it is one.
    """

    source: View | None
    module: str
    tensor: str
    target: View
    value: float | int | None = None

    @property
    def place(self) -> str:
        """Qualified name of the tensor that is written."""
        return f"{self.module}.{self.tensor}" if self.module else self.tensor


@attrs.frozen(kw_only=True)
class Plan:
    """The writes of one load, recorded by :func:`weightload.bake`.

    Attributes:
        sources: every source name with its form, in the order in which they were given.
        writes: for each name that is only copied, the copies, in the order of the load.
        computed: names whose tensors the model's loaders compute with, look at or keep: they have
            to go through the loaders as a whole.
        skipped: names that nothing took, such as experts of other ranks.
        places: qualified name and form, in checkpoint format, of every tensor that is written.
        owner: rank that it was made on, and how many there are; ``None`` if nobody has said so.
    """

    sources: dict[str, Form]
    writes: dict[str, tuple[Write, ...]]
    computed: tuple[str, ...]
    skipped: tuple[str, ...]
    places: dict[str, Form]
    owner: tuple[int, int] | None = None

    def reads(self, name: str) -> list[View]:
        """Return the parts of a source that have to be fetched, without repetition.

        Raises:
            UsageError: the plan does not know the name.
        """
        if name not in self.sources:
            raise UsageError(f"The plan was made without {name!r}.")
        if name in self.computed:
            return [self.sources[name].whole]
        views = (write.source for write in self.writes.get(name, ()))
        return list(dict.fromkeys(view for view in views if view is not None))

    def all_reads(self) -> Iterator[tuple[str, View]]:
        """Yield every part that has to be fetched, in the order of a replay."""
        for name in (*self.writes, *self.computed):
            for view in self.reads(name):
                yield name, view

    def to_plain(self) -> dict[str, Any]:
        """Return the plan as builtin types, such as JSON has; :meth:`from_plain` makes it again."""
        return {
            "format": FORMAT,
            "sources": {name: _plain_form(form) for name, form in self.sources.items()},
            "writes": {
                name: [
                    [
                        one.value if one.source is None else _plain_view(one.source),
                        one.module,
                        one.tensor,
                        _plain_view(one.target),
                    ]
                    for one in writes
                ]
                for name, writes in self.writes.items()
            },
            "computed": list(self.computed),
            "skipped": list(self.skipped),
            "places": {name: _plain_form(form) for name, form in self.places.items()},
            "owner": None if self.owner is None else list(self.owner),
        }

    @classmethod
    def from_plain(cls, data: Any) -> Plan:
        """Make a plan again from what :meth:`to_plain` gave.

        Raises:
            UsageError: it was written in another layout, or is damaged.
        """
        found = data.get("format") if isinstance(data, dict) else type(data).__name__
        if found != FORMAT:
            raise UsageError(
                f"The plan has format {found!r}, this version reads {FORMAT}. Make it again with "
                f"bake()."
            )
        try:
            return cls(
                sources={_text(name): _form(form) for name, form in data["sources"].items()},
                writes={
                    _text(name): tuple(map(_write, writes))
                    for name, writes in data["writes"].items()
                },
                computed=_texts(data["computed"]),
                skipped=_texts(data["skipped"]),
                places={_text(name): _form(form) for name, form in data["places"].items()},
                owner=_owner(data["owner"]),
            )
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise UsageError(
                f"The plan cannot be read ({type(error).__name__}: {error}). Make it again with "
                f"bake()."
            ) from error


def _plain_view(view: View) -> list[Any]:
    return [view.offset, list(view.shape), list(view.stride), view.dtype]


def _plain_form(form: Form) -> list[Any]:
    return [list(form.shape), list(form.stride), form.dtype]


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{type(value).__name__} where text belongs")
    return value


def _texts(values: list[Any]) -> tuple[str, ...]:
    if not isinstance(values, list | tuple):
        raise TypeError(f"{type(values).__name__} where a list belongs")
    return tuple(map(_text, values))


def _sizes(values: list[Any]) -> tuple[int, ...]:
    return tuple(map(operator.index, values))


def _owner(data: list[Any] | None) -> tuple[int, int] | None:
    if data is None:
        return None
    rank, size = _sizes(data)
    return rank, size


def _view(data: list[Any]) -> View:
    offset, shape, stride, dtype = data
    return View(
        offset=operator.index(offset),
        shape=_sizes(shape),
        stride=_sizes(stride),
        dtype=_text(dtype),
    )


def _write(data: list[Any]) -> Write:
    source, module, tensor, target = data
    number = isinstance(source, int | float)
    return Write(
        source=None if number else _view(source),
        module=_text(module),
        tensor=_text(tensor),
        target=_view(target),
        value=source if number else None,
    )


def _form(data: list[Any]) -> Form:
    shape, stride, dtype = data
    return Form(shape=_sizes(shape), stride=_sizes(stride), dtype=_text(dtype))
