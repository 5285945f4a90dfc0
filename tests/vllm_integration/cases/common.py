"""What the cases have in common: look at a live engine from outside of weightload."""

import collections
import functools
import json
import os
import sys
import traceback
from pathlib import Path

import torch

from weightload.arena import Arena
from weightload.vllm.testing import families, probe
from weightload.vllm.worker import gather, run_operation


def main(run):
    """Run a case with the arguments of the command line, write its result, and leave at once.

    Engines that failed may keep an interpreter from ending.
    """
    try:
        out = Path(sys.argv[2])
        partial = out.with_suffix(".tmp")
        partial.write_text(json.dumps(run(**json.loads(sys.argv[1]))))
        partial.rename(out)
        status = 0
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def checkpoints(family, folder):
    """Write two checkpoints that differ in every value, and return their folders."""
    return tuple(
        families.make_checkpoint(family, Path(folder) / name, seed=seed)
        for name, seed in (("A", 1), ("B", 2))
    )


def start(family, path, **options):
    """Start an engine with what its family needs."""
    return probe.start_engine(path, **{**families.get_family(family).engine, **options})


def fresh(family, path, **options):
    """Return what a new engine on a checkpoint computes."""
    llm = start(family, path, **options)
    seen = probe.observe(llm)
    probe.stop_engine(llm)
    return seen


def model_of(llm):
    """Return the module of an engine in this process."""
    [model] = llm.collective_rpc(lambda worker: worker.get_model())
    return model


def operate(llm, operation, **arguments):
    """Run one of the worker's operations in this process, as ``reload`` does."""
    arguments = {"operation": operation, "local": True, **arguments}
    [value] = gather(llm.collective_rpc(run_operation, kwargs=arguments))
    return value


class Buckets:
    """The files through which this process hands tensors to workers."""

    def __init__(self):
        self._paths = set()
        create = Arena.create

        def remembered(nbytes):
            arena = create(nbytes)
            self._paths.add(Path(arena.path))
            return arena

        Arena.create = remembered

    def left(self):
        """Return those that are still there, or say that there never was one."""
        return [str(path) for path in self._paths if path.exists()] if self._paths else ["none"]


class Places:
    """Where a model's parameters and buffers are; the storages are kept alive meanwhile."""

    def __init__(self, model):
        self._model = model
        self._before = dict(self._now())

    def _now(self):
        for path, module in self._model.named_modules():
            for section in (module._parameters, module._buffers):
                for name, tensor in section.items():
                    if tensor is not None:
                        yield f"{path}.{name}", (tensor, self._look(tensor))

    @staticmethod
    def _look(tensor):
        meta = tensor.is_meta
        return {
            "storage": None if meta else tensor.untyped_storage(),
            "storage address": 0 if meta else tensor.untyped_storage().data_ptr(),
            "address": 0 if meta else tensor.data_ptr(),
            "device": str(tensor.device),
            "dtype": tensor.dtype,
            "shape": tuple(tensor.shape),
            "stride": tuple(tensor.stride()),
            "offset": tensor.storage_offset(),
        }

    def changes(self):
        """Return a sentence for every tensor that is not where and what it was."""
        now = dict(self._now())
        found = [f"{name} is new" for name in now.keys() - self._before.keys()]
        for name, (tensor, before) in self._before.items():
            if name not in now:
                found.append(f"{name} is gone")
                continue
            live, after = now[name]
            if live is not tensor:
                found.append(f"{name} is another object")
            if after["device"] == "meta":
                found.append(f"{name} is on meta")
            elif before["storage"]._cdata != after["storage"]._cdata:
                found.append(f"{name} has another storage")
            found += [
                f"{name}: {key} was {before[key]} and is {after[key]}"
                for key in before
                if key != "storage" and before[key] != after[key]
            ]
        return found


class HookCounter:
    """Counts every call of a ``process_weights_after_loading`` in vLLM, by module and class."""

    def __init__(self):
        self._calls = []
        for cls in _vllm_classes():
            hook = vars(cls).get("process_weights_after_loading")
            if callable(hook) and not getattr(hook, "__isabstractmethod__", False):
                cls.process_weights_after_loading = self._counted(cls, hook)

    def _counted(self, cls, hook):
        @functools.wraps(hook)
        def counted(this, *args, **kwargs):
            modules = [x for x in (this, *args, *kwargs.values()) if isinstance(x, torch.nn.Module)]
            # The module itself is kept, so that its id is not used again.
            self._calls.append((modules[0] if modules else None, cls.__qualname__))
            return hook(this, *args, **kwargs)

        return counted

    def take(self, model):
        """Return how often each hook ran since the last time, and forget it."""
        paths = {id(module): path for path, module in model.named_modules()}
        counts = collections.Counter(
            f"{'' if module is None else paths.get(id(module), '?')} {name}"
            for module, name in self._calls
        )
        self._calls.clear()
        return dict(counts)


def _vllm_classes():
    found = {
        id(thing): thing
        for name, module in list(sys.modules.items())
        if name.split(".")[0] == "vllm" and module is not None
        for thing in list(vars(module).values())
        if isinstance(thing, type) and thing.__module__.startswith("vllm.")
    }
    return list(found.values())
