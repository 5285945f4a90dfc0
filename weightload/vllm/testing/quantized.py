"""Llama with quantised linear layers, as the formats lay them out on disk.

The integers and scales are drawn directly: they quantise no model, but a kernel cannot tell.
"""

import math
from typing import Any

import torch

from weightload.vllm.testing.parts import (
    Config,
    Family,
    Tensors,
    TensorSpec,
    base_config,
    decoder,
)

GROUP = 32
"""Input features that share a scale in the formats of four bits."""

EIGHT_BIT_SPREAD = 73.0
"""Standard deviation of uniform integers from -127 to 127."""

FOUR_BIT_SPREAD = 4.6
"""Standard deviation of uniform integers from 0 to 15."""


def scale(shape: tuple[int, ...], columns: int, spread: float, gain: float) -> TensorSpec:
    """Return scales that bring integers of standard deviation `spread` to the size of `matrix`."""
    middle = gain / math.sqrt(columns) / spread
    return TensorSpec(shape=shape, kind="uniform", low=0.7 * middle, high=1.3 * middle)


def packed(*shape: int) -> TensorSpec:
    """Return words of 32 random bits, which hold eight integers of four bits each."""
    return TensorSpec(shape=shape, kind="integer", low=-(2**31), high=2**31 - 1, dtype=torch.int32)


def int8_linear(
    name: str, rows: int, columns: int, *, gain: float = 1.0, biased: bool = False
) -> Tensors:
    """Yield int8 weights and one scale per row, for activations that are quantised at run time."""
    _refuse_bias(name, biased)
    yield (
        f"{name}.weight",
        TensorSpec(shape=(rows, columns), kind="integer", low=-127, high=127, dtype=torch.int8),
    )
    yield f"{name}.weight_scale", scale((rows, 1), columns, EIGHT_BIT_SPREAD, gain)


def static_linear(
    name: str, rows: int, columns: int, *, gain: float = 1.0, biased: bool = False
) -> Tensors:
    """Yield int8 weights with one scale, and an input scale of which 127 steps are about 3.

    Where vLLM fuses layers, it uses the largest of their input scales; the others change nothing.
    """
    _refuse_bias(name, biased)
    yield (
        f"{name}.weight",
        TensorSpec(shape=(rows, columns), kind="integer", low=-127, high=127, dtype=torch.int8),
    )
    yield f"{name}.weight_scale", scale((1,), columns, EIGHT_BIT_SPREAD, gain)
    yield f"{name}.input_scale", TensorSpec(shape=(1,), kind="uniform", low=0.02, high=0.03)


def pack_quantized_linear(
    name: str, rows: int, columns: int, *, gain: float = 1.0, biased: bool = False
) -> Tensors:
    """Yield weights packed along the inputs, scales per group and the shape before packing."""
    _refuse_bias(name, biased)
    yield f"{name}.weight_packed", packed(rows, columns // 8)
    yield f"{name}.weight_scale", scale((rows, columns // GROUP), columns, FOUR_BIT_SPREAD, gain)
    yield f"{name}.weight_shape", TensorSpec(shape=(2,), fixed=(rows, columns), dtype=torch.int64)


def awq_linear(
    name: str, rows: int, columns: int, *, gain: float = 1.0, biased: bool = False
) -> Tensors:
    """Yield weights and zero points packed along the outputs, and scales per group of inputs."""
    _refuse_bias(name, biased)
    groups, spread = columns // GROUP, math.sqrt(2) * FOUR_BIT_SPREAD
    yield f"{name}.qweight", packed(columns, rows // 8)
    yield f"{name}.qzeros", packed(groups, rows // 8)
    yield f"{name}.scales", scale((groups, rows), columns, spread, gain)


def gptq_linear(
    name: str, rows: int, columns: int, *, gain: float = 1.0, biased: bool = False
) -> Tensors:
    """Yield weights packed along the inputs, scales per group, and what symmetry fixes."""
    _refuse_bias(name, biased)
    groups = columns // GROUP
    yield f"{name}.qweight", packed(columns // 8, rows)
    yield (
        f"{name}.qzeros",
        TensorSpec(
            shape=(groups, rows // 8), fixed=(0x77777777,) * (groups * rows // 8), dtype=torch.int32
        ),
    )
    yield f"{name}.scales", scale((groups, rows), columns, FOUR_BIT_SPREAD, gain)
    yield (
        f"{name}.g_idx",
        TensorSpec(
            shape=(columns,), fixed=tuple(i // GROUP for i in range(columns)), dtype=torch.int32
        ),
    )


def _refuse_bias(name: str, biased: bool) -> None:
    if biased:
        raise ValueError(f"{name}: a quantised linear layer with a bias is not described here")


def integers(bits: int, strategy: str, *, dynamic: bool = False, **more: Any) -> dict[str, Any]:
    """Return the arguments with which compressed-tensors describes symmetric integers."""
    return {
        "num_bits": bits,
        "type": "int",
        "symmetric": True,
        "strategy": strategy,
        "dynamic": dynamic,
        **more,
    }


def compressed(layout: str, weights: dict[str, Any], inputs: dict[str, Any] | None) -> Config:
    """Return a Llama whose linear layers but the head are quantised by compressed-tensors."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return _llama(
        {
            "quant_method": "compressed-tensors",
            "format": layout,
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": ["lm_head"],
        }
    )


def _llama(quantization: Config) -> Config:
    return base_config("LlamaForCausalLM", "llama", quantization_config=quantization)


QUANTIZED: tuple[Family, ...] = (
    Family(
        name="w8a8-dynamic",
        summary="Llama in int8 with a scale per row and activations quantised per token",
        config=compressed(
            "int-quantized", integers(8, "channel"), integers(8, "token", dynamic=True)
        ),
        tensors=lambda config: decoder(config, linear=int8_linear),
    ),
    Family(
        name="w8a8-static",
        summary="Llama in int8 with one scale per weight and one fixed scale per input",
        config=compressed("int-quantized", integers(8, "tensor"), integers(8, "tensor")),
        tensors=lambda config: decoder(config, linear=static_linear),
    ),
    Family(
        name="w4a16",
        summary="Llama with weights of four bits in groups of 32, packed as by compressed-tensors",
        config=compressed("pack-quantized", integers(4, "group", group_size=GROUP), None),
        tensors=lambda config: decoder(config, linear=pack_quantized_linear),
    ),
    Family(
        name="awq",
        summary="Llama with weights and zero points of four bits in groups of 32, packed as by AWQ",
        config=_llama(
            {
                "quant_method": "awq",
                "bits": 4,
                "group_size": GROUP,
                "zero_point": True,
                "version": "gemm",
            }
        ),
        tensors=lambda config: decoder(config, linear=awq_linear),
    ),
    Family(
        name="gptq",
        summary="Llama with symmetric weights of four bits in groups of 32, packed as by GPTQ",
        config=_llama(
            {
                "quant_method": "gptq",
                "bits": 4,
                "group_size": GROUP,
                "desc_act": False,
                "sym": True,
                "lm_head": False,
            }
        ),
        tensors=lambda config: decoder(config, linear=gptq_linear),
    ),
)
