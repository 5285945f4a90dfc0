"""The command line: looks at checkpoints and rules without starting an engine.

Needs the extra ``cli``. ``weightload check FOLDER`` tells whether every file is whole;
``weightload explain MODULE:CLASS`` tells what a session does with modules of a type.
"""

from __future__ import annotations

import collections
import importlib
import math
from pathlib import Path

import click

from weightload import __version__
from weightload.errors import WeightLoadError
from weightload.files import checkpoint_folder, read_files
from weightload.registry import ModuleRegistry

__all__ = ["main"]


@click.group()
@click.version_option(__version__)
def main() -> None:
    """Transactional weight loading for live inference engines."""


@main.command()
@click.argument("folder", type=click.Path(path_type=Path))
def check(folder: Path) -> None:
    """Read the headers of a checkpoint's safetensors files and check that their data is there."""
    try:
        files = sorted(checkpoint_folder(folder).glob("*.safetensors"))
        headers = [one for file in read_files(files) for one in file.headers.values()]
    except WeightLoadError as error:
        raise click.ClickException(str(error)) from error
    elements: collections.Counter[str] = collections.Counter()
    for header in headers:
        elements[header.dtype] += math.prod(header.shape)
    kinds = ", ".join(f"{count:,} x {dtype}" for dtype, count in sorted(elements.items()))
    click.echo(f"{len(files)} files, {len(headers)} tensors, {kinds or 'no elements'}: whole.")


@main.command()
@click.argument("target", metavar="MODULE:CLASS")
@click.option("--vllm", is_flag=True, help="Ask the rules for vLLM's modules.")
def explain(target: str, vllm: bool) -> None:
    """Say which rule applies to modules of a type, and why."""
    home, _, name = target.partition(":")
    try:
        cls = getattr(importlib.import_module(home), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise click.BadParameter(f"{target!r} names no class ({error})") from error
    if not isinstance(cls, type):
        raise click.BadParameter(f"{target!r} is no class but {cls!r}")
    click.echo(_registry(vllm).explain(cls))


def _registry(vllm: bool) -> ModuleRegistry:
    if vllm:
        from weightload.vllm.framework import attention_rules, vllm_registry

        registry = vllm_registry.copy()
        attention_rules(registry, process=lambda module: None)
        return registry
    from weightload.framework import default_registry

    return default_registry
