"""Fifty reloads of one engine with weights that change each time, and what stays in memory."""

import gc
import itertools
import os
import shutil
from pathlib import Path

import torch
from common import Places, fresh, main, model_of, start

from weightload.vllm import reload
from weightload.vllm.plugin import register
from weightload.vllm.testing import families, probe
from weightload.vllm.testing.sources import read_checkpoint

RELOADS = 50
LOOKED_AT = (1, 13, 26, 38, 50)
ORIGINS = ("a mapping", "an iterator", "files")
FAILING = (4, 17, 22, 35, 41)


class SourceFailure(Exception):
    """What a source raises here, and nothing else does."""


def failing(weights):
    for index, pair in enumerate(weights.items()):
        if index == len(weights) // 2:
            raise SourceFailure
        yield pair


def held():
    """Return what this process holds, in MiB and in numbers of objects."""
    gc.collect()
    objects = gc.get_objects()
    tensors = [one for one in objects if issubclass(type(one), torch.Tensor) and not one.is_meta]
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    found = {
        "resident": pages * os.sysconf("SC_PAGE_SIZE") / 2**20,
        "objects": len(objects),
        "tensors": len(tensors),
        "storages": len(storages),
        "bytes": sum(storages.values()),
    }
    del objects, tensors
    return found


def run(family, folder):
    register()
    folder = Path(folder)

    def checkpoint(seed):
        return families.make_checkpoint(family, folder / str(seed), seed=seed)

    right = {seed: fresh(family, checkpoint(seed)) for seed in LOOKED_AT}
    llm = start(family, checkpoint(0), load_format="weightload")
    gc.unfreeze()  # or what exists by now, the engine above all, would not be seen
    places = Places(model_of(llm))
    result = {"verdicts": {}, "held": [], "ways": []}
    seeds = itertools.pairwise(LOOKED_AT)
    result["one after another"] = [
        probe.describe_difference(right[one], right[other]) for one, other in seeds
    ]
    for seed in range(1, RELOADS + 1):
        path = checkpoint(seed)
        weights = read_checkpoint(path)
        commit = ("stream", "atomic")[seed % 2]
        origin = ORIGINS[seed % 3]
        given = {"a mapping": weights, "an iterator": iter(weights.items()), "files": path}[origin]
        if seed in FAILING:
            try:
                reload(llm, failing(weights), commit=commit)
            except SourceFailure:
                result["ways"].append(f"failed, {commit}")
        reload(llm, given, version=seed, commit=commit)
        result["ways"].append(f"{origin}, {commit}")
        seen = probe.observe(llm)
        if seed in right:
            result["verdicts"][seed] = probe.describe_difference(right[seed], seen)
        del weights, given, seen
        shutil.rmtree(path)
        if seed % 10 == 0:
            result["held"].append(held())
    result["changes"] = places.changes()
    return result


if __name__ == "__main__":
    main(run)
