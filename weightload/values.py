"""Says of values whether they are finite, and whether they may be cast."""

from __future__ import annotations

import torch

from weightload.errors import WeightMismatchError

__all__ = ["finite", "refuse_values", "wide_floats"]

_ALL_FINITE = frozenset({getattr(torch, "float4_e2m1fn_x2", None)})
"""Types that have neither NaN nor infinity."""
_WIDE = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})


def wide_floats(*dtypes: torch.dtype | None) -> bool:
    """Whether all are floats of 16 bits or more, between which values may be cast.

    A narrower float goes with a scale, and an integer with a packing; neither is cast.
    """
    return all(dtype in _WIDE for dtype in dtypes)


def finite(tensor: torch.Tensor) -> bool:
    """Whether no element is NaN or infinite; one pass, without memory of the tensor's size."""
    if not tensor.is_floating_point() or not tensor.numel() or tensor.dtype in _ALL_FINITE:
        return True
    values = tensor.detach()
    low, high = torch.aminmax(values if wide_floats(values.dtype) else values.float())
    return bool(torch.isfinite(low) & torch.isfinite(high))


def refuse_values(name: str, tensor: torch.Tensor) -> None:
    """Refuse a tensor that is not :func:`finite`, and say where.

    Raises:
        WeightMismatchError: always.
    """
    values = tensor.detach().float() if not wide_floats(tensor.dtype) else tensor.detach()
    index = tuple(torch.nonzero(~torch.isfinite(values))[0].tolist())
    raise WeightMismatchError(
        f"{name!r} holds {float(values[index])} at index {list(index)}, and this session was "
        f"opened with check_finite=True.",
        name=name,
        index=list(index),
    )
