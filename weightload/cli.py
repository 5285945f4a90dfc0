"""The command line: looks at checkpoints and rules without starting an engine.

Needs the extra ``cli``. ``weightload check FOLDER`` tells whether every file is whole;
``weightload explain MODULE:CLASS`` tells what a session does with modules of a type.
"""

from __future__ import annotations

import collections
import importlib
from pathlib import Path

import click

from weightload import __version__
from weightload.errors import WeightLoadError, name_some
from weightload.files import absent_of, checkpoint_folder, read_files, safetensors_of
from weightload.registry import ModuleRegistry

__all__ = ["main"]


@click.group()
@click.version_option(__version__)
def main() -> None:
    """Transactional weight loading for live inference engines."""


@main.command()
@click.argument("folder", type=click.Path(path_type=Path))
def check(folder: Path) -> None:
    """Read the headers of a checkpoint's safetensors files and check that their data is there.

    Of a folder with an index, these are the files that it names.
    """
    try:
        files = read_files(safetensors_of(checkpoint_folder(folder)))
        absent = absent_of(folder, files)
    except WeightLoadError as error:
        raise click.ClickException(str(error)) from error
    if absent:
        raise click.ClickException(
            f"The index of {str(folder)!r} names tensors that no file holds: {name_some(absent)}."
        )
    headers = [one for file in files for one in file.headers.values()]
    elements: collections.Counter[str] = collections.Counter()
    for header in headers:
        elements[header.dtype] += header.elements
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
    except (Exception, SystemExit) as error:  # whatever the module does when it is imported
        why = f"{type(error).__name__}: {error}"
        raise click.BadParameter(f"{target!r} names no class ({why})") from error
    if not isinstance(cls, type):
        raise click.BadParameter(f"{target!r} is no class but {cls!r}")
    click.echo(_registry(vllm).explain(cls))


def _registry(vllm: bool) -> ModuleRegistry:
    if vllm:
        try:
            from weightload.vllm.framework import attention_rules, vllm_registry
        except ImportError as error:
            raise click.UsageError(f"--vllm takes vLLM, which is not here ({error}).") from error
        registry = vllm_registry.copy()
        attention_rules(registry, process=lambda module: None)
        return registry
    from weightload.framework import default_registry

    return default_registry
