"""Random checkpoints of many model families, small enough to start an engine on a CPU in seconds.

Every tensor of a checkpoint is random, so two seeds differ in every tensor, and a tensor that a
reload forgot shows in the outputs.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from weightload.vllm.testing.classic import CLASSIC
from weightload.vllm.testing.dense import DENSE
from weightload.vllm.testing.experts import EXPERTS
from weightload.vllm.testing.parts import Family, TensorSpec
from weightload.vllm.testing.quantized import QUANTIZED

FAMILIES: dict[str, Family] = {
    family.name: family for family in (*DENSE, *CLASSIC, *EXPERTS, *QUANTIZED)
}


def get_family(family: str | Family) -> Family:
    """Return the family called so; a KeyError for an unknown name lists those that there are."""
    if isinstance(family, Family):
        return family
    if family not in FAMILIES:
        raise KeyError(f"no family {family!r}; the families are {', '.join(sorted(FAMILIES))}")
    return FAMILIES[family]


def tensor_specs(family: str | Family) -> dict[str, TensorSpec]:
    """Return the specification of every tensor of a family's checkpoint, by name."""
    found = get_family(family)
    return dict(found.tensors(found.config))


def make_checkpoint(
    family: str | Family, directory: Path, *, seed: int, dtype: torch.dtype = torch.bfloat16
) -> Path:
    """Write config.json and model.safetensors with random weights and return the directory.

    The directory is made when it is missing, files of an earlier checkpoint are replaced. The
    content depends on the family, the seed and the dtype alone.
    """
    found = get_family(family)
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    config = {**found.config, "dtype": str(dtype).removeprefix("torch.")}
    weights = {
        name: spec.draw(name, seed, dtype).contiguous()
        for name, spec in tensor_specs(found).items()
    }
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return directory
