"""Compare two load tests: the changes of the figures, and whether they exceed the noise."""

from __future__ import annotations

from dataclasses import dataclass

from rich.table import Table

from builder.common.errors import SpecError
from builder.serving.load.noise import Estimate, RelativeChange, compare_means
from builder.serving.load.record import FIGURES, Figure, LoadTestRun

COMPARED = tuple(
    figure
    for figure in FIGURES
    if figure.title in ("requests/s", "p50 ms", "p99 ms", "first token p50 ms", "between tokens p50 ms", "tokens/s")
)


@dataclass(frozen=True)
class FigureComparison:
    """One figure of one model under one level, in both runs."""

    model: str
    level: str
    figure: Figure
    before: Estimate
    after: Estimate
    change: RelativeChange | None

    @property
    def verdict(self) -> str:
        """Verdict in words: better, worse, or within the noise."""
        if self.change is None or self.change.half is None:
            return "noise unknown"
        if not self.change.sure:
            return "within noise"
        return "better" if (self.change.share > 0) == self.figure.higher else "worse"


def compare_runs(before: LoadTestRun, after: LoadTestRun) -> list[FigureComparison]:
    """Compare the figures of each model and level that both runs have from the same program.

    Raises SpecError if they share none.
    """
    earlier, rows = before.repeats(), []
    for (model, level), loads in after.repeats().items():
        same = [load for load in earlier.get((model, level), []) if load.program == loads[0].program]
        for figure in COMPARED:
            both = same, loads
            old, new = ([value for value in map(figure.of, side) if value is not None] for side in both)
            if old and new:
                change = compare_means(old, new)
                rows.append(FigureComparison(model, str(level), figure, Estimate.of(old), Estimate.of(new), change))
    if not rows:
        had = ", ".join(sorted({f"{model} at {level}" for model, level in earlier}))
        raise SpecError(
            f"the earlier load test has no model and level in common with this one: it has {had}, by {before.programs}"
        )
    return rows


def comparison_table(rows: list[FigureComparison], before: LoadTestRun) -> Table:
    """Return a table with one row for each model, level and figure."""
    result = Table(title=f"against the load test of {before.when}", title_justify="left")
    for name in ("model", "load", "figure"):
        result.add_column(name, no_wrap=True)
    for name in ("before", "now", "change", ""):
        result.add_column(name, justify="right")
    for row in rows:
        shown = "-" if row.change is None else str(row.change)
        result.add_row(row.model, row.level, row.figure.title, str(row.before), str(row.after), shown, row.verdict)
    result.caption = (
        "± is the 95% interval over the repeats of each run (Welch's t); it knows nothing of what else the machines "
        "did meanwhile"
    )
    result.caption_justify = "left"
    return result
