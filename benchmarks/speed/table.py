"""A row of the table: what was measured, what it must hold and what it wants to hold."""

from __future__ import annotations

from typing import Any

import attrs

from benchmarks.speed.measure import Series


@attrs.frozen
class Bound:
    """One inequality: ``value`` at most ``limit``.

    Attributes:
        what: what the value is, in words.
        value: it, ``None`` if it could not be measured.
        limit: at most this.
        unit: of both.
        cpu_only: whether CPU time alone decides it, so that a busy machine may check it.
    """

    what: str
    value: float | None
    limit: float
    unit: str = "x"
    cpu_only: bool = True

    @property
    def held(self) -> bool:
        """Whether it holds; what was not measured does not."""
        return self.value is not None and self.value <= self.limit

    def broken(self, *, smoke: bool = False) -> bool:
        """Whether it does not hold; a quick check asks only for what CPU time decides."""
        return not self.held and (self.cpu_only or not smoke)

    def __str__(self) -> str:
        value = "not measured" if self.value is None else f"{self.value:.3g}"
        unit = "" if self.unit == "x" else f" {self.unit}"
        return f"{self.what} {value} (<= {self.limit:g}{unit})"


@attrs.define(kw_only=True)
class Row:
    """One row.

    Attributes:
        name: such as "C1 dense06".
        what: what is measured.
        unit: of the three figures.
        native, limit, ours: what goes into the table, already in words.
        must, goal: what it is held to.
        notes: what a reader has to know.
        series: every single time.
    """

    name: str
    what: str
    native: str = "-"
    limit: str = "-"
    ours: str = "-"
    must: list[Bound] = attrs.field(factory=list)
    goal: list[Bound] = attrs.field(factory=list)
    notes: list[str] = attrs.field(factory=list)
    series: Series | None = None
    facts: dict[str, Any] = attrs.field(factory=dict)

    def plain(self) -> dict[str, Any]:
        """Return everything for the result's file."""
        bounds = lambda given: [{**attrs.asdict(one), "held": one.held} for one in given]  # noqa: E731
        return {
            "row": self.name,
            "what": self.what,
            "native": self.native,
            "limit": self.limit,
            "weightload": self.ours,
            "must": bounds(self.must),
            "goal": bounds(self.goal),
            "notes": self.notes,
            "facts": self.facts,
            "series": self.series.plain() if self.series else None,
        }


def seconds(value: float) -> str:
    """Return a time in a unit that suits it."""
    if value >= 0.1:
        return f"{value:.3f} s"
    return f"{value * 1e3:.2f} ms" if value >= 1e-3 else f"{value * 1e6:.1f} us"


def arm(series: Series, name: str) -> str:
    """Return an arm's figure: the median of CPU time, and whether its result was wrong."""
    mark = ", wrong result" if name in series.wrong else ""
    return f"{seconds(series.cpu(name))}{mark}"


def verdict(bounds: list[Bound]) -> str:
    """Return "yes", or what did not hold."""
    if not bounds:
        return "-"
    return "yes" if all(one.held for one in bounds) else "**no**"


HEAD = ["row", "vLLM", "limit", "weightload", "must", "held?", "goal", "held?"]


def cells(row: Row) -> list[str]:
    """Return what stands in the row's cells."""
    return [
        row.name,
        row.native,
        row.limit,
        row.ours,
        "; ".join(map(str, row.must)) or "-",
        verdict(row.must),
        "; ".join(map(str, row.goal)) or "-",
        verdict(row.goal),
    ]


def markdown(rows: list[Row]) -> str:
    """Return the table."""
    lines = [HEAD, ["---"] * len(HEAD), *map(cells, rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"
