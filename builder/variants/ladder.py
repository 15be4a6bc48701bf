"""The ladder of a generating model: which rung is served, and whether it keeps what was asked.

Knows rungs and required; knows nothing about graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from builder.errors import VerificationError
from builder.progress import Stage
from builder.report.record import Rung
from builder.verify.verdict import Bound

Candidate = TypeVar("Candidate")


@dataclass(frozen=True)
class Required:
    """The least agreement with PyTorch, and the most that perplexity may grow, as a ratio to PyTorch's."""

    quality: float
    perplexity: float

    def bounds(self, rung: Rung, base: Rung, metric: str) -> tuple[Bound, ...]:
        """What is asked of `rung`, whose `quality` is `metric`."""
        return (
            Bound(f"the {metric} of {rung.name}", rung.quality or 0.0, at_least=self.quality),
            Bound(f"the perplexity of {rung.name} to PyTorch's", _growth(rung, base), at_most=self.perplexity),
        )

    def keeps(self, rung: Rung, base: Rung) -> bool:
        return all(bound.kept for bound in self.bounds(rung, base, ""))

    def refuse(self, rung: Rung, base: Rung, metric: str) -> None:
        """Raises VerificationError for a rung that loses too much."""
        if not self.keeps(rung, base):
            raise VerificationError(
                f"{rung.name} has a {metric} of {rung.quality:.4f} against PyTorch ({self.quality:.4f} is required) "
                f"and its perplexity is {_growth(rung, base):.4f} of PyTorch's (at most {self.perplexity:.4f}). "
                "Nothing was published: use another --precision or --cache, or accept less with --quality and "
                "--perplexity"
            )


@dataclass(frozen=True)
class Climbed(Generic[Candidate]):
    """The rung that is served, what it is made of, and in words why, where it was a choice."""

    ladder: tuple[Rung, ...]
    chosen: Rung
    candidate: Candidate
    choice: str | None


def climb(
    wanted: Sequence[str],
    required: Required,
    base: Rung,
    exact: tuple[Rung, Candidate],
    make: Callable[[str], tuple[Rung, Candidate]],
    stage: Stage,
) -> Climbed[Candidate]:
    """From PyTorch (`base`) over fp32 (`exact`) to the one precision of `wanted`, or to the fastest of several.

    Of several, fp32 included, only those that keep `required` are chosen from.
    """
    made = []
    for precision in wanted:
        with stage(precision):
            made.append(make(precision))
    ladder = (base, exact[0], *(rung for rung, _ in made))
    if len(made) <= 1:
        chosen, candidate = (made or [exact])[0]
        return Climbed(ladder, chosen, candidate, None)
    kept = [exact, *(pair for pair in made if required.keeps(pair[0], base))]
    chosen, candidate = min(kept, key=lambda pair: _time(pair[0]))
    missed = [rung.name for rung, _ in made if not required.keeps(rung, base)]
    choice = f"auto chose {chosen.name}" + (f"; {', '.join(missed)} missed the quality asked" if missed else "")
    return Climbed(ladder, chosen, candidate, choice)


def _growth(rung: Rung, base: Rung) -> float:
    return (rung.perplexity or 1.0) / (base.perplexity or 1.0)


def _time(rung: Rung) -> float:
    """The product of a token's time at batch 1 and at batch 8."""
    one, eight = (ms for cell, ms in rung.latency_ms.items() if cell.startswith("token"))
    return one * eight
