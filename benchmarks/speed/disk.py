"""Rows C8 and C9: from a checkpoint's file to the live parameters, with the file in memory and not."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.speed.bench import Bench
from benchmarks.speed.measure import in_turn
from benchmarks.speed.memory import facts
from benchmarks.speed.packing import Floor
from benchmarks.speed.table import Bound, Row, arm, seconds
from weightload.files import File
from weightload.reading import Checkpoint

MUST = {"dense06": (0.40, 0.30), "deep": (0.15, 0.08)}
"""By shape what must hold and what is wanted, of vLLM's time where its result is right."""


class Files:
    """Two checkpoints of one shape, and the ways to load them."""

    def __init__(self, bench: Bench, root: Path) -> None:
        self.bench = bench
        self.folders = {}
        for number in (1, 2):
            bench.source.turn(number)
            self.folders[number] = bench.source.write(root / str(number))
        self.buffer = torch.zeros(max(map(self.size, self.folders)), dtype=torch.uint8)
        os.sync()  # what is not on the disk yet cannot be dropped from memory

    def which(self, number: int) -> int:
        """Return which checkpoint a round loads; the bench's rounds have three, and files two."""
        return number % 2 + 1

    def file(self, which: int) -> Path:
        """Return the one file of a checkpoint."""
        return self.folders[which] / "model.safetensors"

    def size(self, which: int) -> int:
        """Return its size."""
        return self.file(which).stat().st_size

    def native(self, number: int) -> None:
        """Reload as vLLM's worker does when it gets a path."""
        from vllm.model_executor.model_loader.reload import inplace

        built = self.bench.native
        with built.ambient():
            inplace.reload_weights(
                built.vllm_config,
                built.model,
                weights_iterator=None,
                weights_path=str(self.folders[self.which(number)]),
                is_checkpoint_format=True,
            )

    def ours(self, number: int) -> None:
        """Reload through a session."""
        self.bench.ours.ours(Checkpoint(self.folders[self.which(number)]))

    def read(self, number: int) -> None:
        """Read the whole file into one buffer."""
        which = self.which(number)
        view = memoryview(self.buffer.numpy())[: self.size(which)]
        handle = os.open(self.file(which), os.O_RDONLY)
        try:
            done = 0
            while done < len(view):
                done += os.preadv(handle, [view[done:]], done)
        finally:
            os.close(handle)

    def drop(self, number: int) -> None:
        """Take the round's file out of the system's memory."""
        handle = os.open(self.file(self.which(number)), os.O_RDONLY)
        try:
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)

    def contents(self, number: int) -> File:
        """Return what the round's file holds."""
        return Checkpoint(self.folders[self.which(number)]).contents[0]

    def check(self, number: int, arm: str) -> str | None:
        """As the bench does, for the checkpoint of the round."""
        built = {"native": self.bench.native, "ours": self.bench.ours}.get(arm)
        # The bench's weights of round n are those of n % 3 + 1.
        return None if built is None else self.bench.differs(built, self.which(number) - 1)


@contextlib.contextmanager
def files(bench: Bench) -> Iterator[Files]:
    """Write two checkpoints, and remove them again."""
    root = Path(tempfile.mkdtemp(prefix="weightload-speed-"))
    try:
        yield Files(bench, root)
    finally:
        shutil.rmtree(root)


def c8(bench: Bench) -> Row:
    """The file is in the system's memory."""
    bench.settle()
    with files(bench) as made:
        for number in (0, 1):
            made.ours(number)
        arms = {"native": made.native, "ours": made.ours, "L3": made.read}
        floor = None if bench.plain else Floor(bench)
        if floor is not None:
            arms["floor"] = floor.run
            arms["floor, reading"] = lambda n, floor=floor: floor.run_from(made.contents(n))

        def check(number: int, arm: str) -> str | None:
            if floor is not None and arm == "floor, reading":
                return floor.differs(bench.wanted[made.which(number)])
            return made.check(number, arm)

        series = in_turn(arms, bench.rounds, check=check)
    native, read = series.ratio("ours", "native"), series.ratio("ours", "L3")
    row = Row(
        name=f"C8 {bench.shape}",
        what="from a file that is in the page cache to live parameters",
        native=arm(series, "native"),
        limit=f"L3 {arm(series, 'L3')}",
        ours=arm(series, "ours"),
        series=series,
        facts=facts(bench),
    )
    if bench.plain:
        must, goal = MUST[bench.shape]
        row.must = [Bound("of vLLM", native, must)]
        row.goal = [Bound("of vLLM", native, goal), Bound("of L3", read, 1.15)]
    else:
        ratio = series.ratio("ours", "floor, reading")
        row.limit += f", floor {arm(series, 'floor, reading')} ({arm(series, 'floor')} from memory)"
        row.must = [Bound("of the floor", ratio, 1.15)]
        row.goal = [Bound("of the floor", ratio, 1.08)]
        row.facts["of the floor that stages from memory"] = series.ratio("ours", "floor")
        row.notes.append(
            f"the floor reads each tensor to where it is staged and packs it there; weightload takes "
            f"{series.ratio('ours', 'floor'):.2f} of the floor of C7, which reads no file"
        )
    return row


def c9(bench: Bench) -> Row:
    """The file is on the disk only; seconds of the wall, since that is what a disk takes."""
    bench.settle()
    with files(bench) as made:
        made.ours(0)
        arms = {"native": made.native, "ours": made.ours, "L3": made.read}
        rounds = 3 * bench.rounds  # others read from the disk at times
        series = in_turn(arms, rounds, check=made.check, between=made.drop)
    ratio = series.ratio("ours", "native", wall=True)
    row = Row(
        name=f"C9 {bench.shape}",
        what="from a file that is not in the page cache to live parameters, wall",
        native=seconds(series.wall("native")),
        limit=f"L3 {seconds(series.wall('L3'))}",
        ours=seconds(series.wall("ours")),
        series=series,
        facts=facts(bench),
    )
    row.notes.append(f"{rounds} rounds")
    row.must = [Bound("of vLLM", ratio, 1.0, cpu_only=False)]
    row.goal = [Bound("of vLLM", ratio, 0.85, cpu_only=False)]
    return row
