"""Rows C1 to C5: whole reloads from memory of models whose layout is the checkpoint's."""

from __future__ import annotations

from typing import Any

from benchmarks.speed.bench import Bench
from benchmarks.speed.measure import Series, Taken, WrongResult, taken
from benchmarks.speed.table import Bound, Row, arm, seconds
from weightload.session import WeightLoadSession


def _limits(series: Series) -> str:
    return f"L1 {arm(series, 'L1')}, L2 {arm(series, 'L2')}"


def _row(bench: Bench, name: str, what: str) -> tuple[Row, Series]:
    bench.settle()
    series = bench.compare(bench.whole())
    row = Row(
        name=f"{name} {bench.shape}",
        what=what,
        native=arm(series, "native"),
        limit=_limits(series),
        ours=arm(series, "ours"),
        series=series,
        facts=facts(bench),
    )
    return row, series


def facts(bench: Bench) -> dict[str, Any]:
    """Return the size of what is loaded."""
    return {"tensors": bench.count, "bytes": bench.nbytes, "modules": bench.modules}


def c1(bench: Bench) -> Row:
    """In place, dense."""
    row, series = _row(bench, "C1", "whole reload, in place, dense")
    native, loop = series.ratio("ours", "native"), series.ratio("ours", "L2")
    row.must = [Bound("of vLLM", native, 0.45), Bound("of L2", loop, 1.30)]
    row.goal = [Bound("of vLLM", native, 0.33), Bound("of L2", loop, 1.10)]
    return row


def c2(bench: Bench) -> Row:
    """Large layers."""
    row, series = _row(bench, "C2", "whole reload, in place, large layers")
    native, move = series.ratio("ours", "native"), series.ratio("ours", "L1")
    pages = max(one.faults for one in series.arms["ours"]) * 4096 / bench.nbytes
    row.must = [Bound("of vLLM", native, 0.25)]
    row.goal = [
        Bound("of vLLM", native, 0.15),
        Bound("of L1", move, 1.25),
        Bound("new pages, of the bytes", pages, 0.01),
    ]
    return row


def c3(bench: Bench) -> Row:
    """Time per tensor beyond copying it."""
    row, series = _row(bench, "C3", "time per tensor beyond L2")
    each = lambda one: (series.cpu(one) - series.cpu("L2")) / bench.count * 1e6  # noqa: E731
    ours, native = each("ours"), each("native")
    row.facts.update(ours_us=ours, native_us=native)
    wrong = ", wrong result" if "native" in series.wrong else ""
    row.native, row.ours = f"{native:.0f} us{wrong}", f"{ours:.2f} us"
    row.limit = f"0 us (L2 itself {series.cpu('L2') / bench.count * 1e6:.2f} us)"
    row.must = [Bound("per tensor", ours, 10, "us")]
    row.goal = [Bound("per tensor", ours, 5, "us"), Bound("of vLLM", ours / native, 1 / 40)]
    return row


def c4(bench: Bench) -> Row:
    """Two hundred layers."""
    row, series = _row(bench, "C4", "whole reload, in place, 200 layers")
    native, loop = series.ratio("ours", "native"), series.ratio("ours", "L2")
    row.must = [Bound("of vLLM", native, 0.15)]
    row.goal = [Bound("of vLLM", native, 0.09), Bound("of L2", loop, 1.35)]
    return row


def c5(bench: Bench) -> Row:
    """Start and finish, with every address verified."""
    bench.settle()
    series = _fixed(bench)
    ours, native = series.cpu("ours"), series.cpu("native")
    row = Row(
        name=f"C5 {bench.shape}",
        what="start and finish with every tensor verified, nothing in between",
        native=arm(series, "native"),
        ours=arm(series, "ours"),
        series=series,
        facts=facts(bench),
    )
    row.must = [Bound("start and finish", ours * 1e3, 25, "ms")]
    row.goal = [
        Bound("start and finish", ours * 1e3, 10, "ms"),
        Bound("per module", ours / bench.modules * 1e6, 4, "us"),
    ]
    row.notes.append(
        f"prepare() and finish() around a complete load, which is not counted; vLLM: its start and "
        f"finish with nothing loaded, {seconds(native)}"
    )
    return row


def _fixed(bench: Bench) -> Series:
    series = Series()
    for number in range(bench.rounds + 1):
        bench.turn(number)
        native = taken(lambda: bench.native.native({}))
        session = WeightLoadSession(bench.ours.model, version=f"C5 {number}")
        start = taken(session.prepare)
        session.load(bench.source.tensors)
        finish = taken(session.finish)
        wrong = bench.check(number, "ours")
        if wrong:
            raise WrongResult(f"C5, round {number}: {wrong}")
        if number:
            series.add("native", native)
            series.add(
                "ours",
                Taken(
                    start.cpu + finish.cpu, start.wall + finish.wall, start.faults + finish.faults
                ),
            )
    return series
