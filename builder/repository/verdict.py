"""Results that can be published: entries whose answers were compared with PyTorch's, or marked as unverified."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import InitVar, dataclass, replace

from builder.common.errors import VerificationError
from builder.repository.config.entries import RepositoryEntry
from builder.repository.report.record import BuildReport

_PASSED = object()  # only `Verified.after` uses it


@dataclass(frozen=True)
class ParityBound:
    """Result of a comparison with PyTorch, and the range that it must be in."""

    name: str
    value: float
    at_least: float = -math.inf
    at_most: float = math.inf

    @property
    def is_met(self) -> bool:
        """True if the value is in its range; NaN is in none."""
        return self.at_least <= self.value <= self.at_most

    def __str__(self) -> str:
        bound = f"at most {self.at_most:.4g}" if math.isfinite(self.at_most) else f"at least {self.at_least:.4g}"
        return f"{self.name} is {self.value:.4g}, {bound} is right"


@dataclass(frozen=True)
class Comparison:
    """Comparisons of a build with PyTorch: the exact graph's errors, and the quality of the variant that is served."""

    bounds: tuple[ParityBound, ...]

    def refuse(self) -> None:
        """Raise VerificationError if a bound was missed or nothing was compared."""
        missed = [str(bound) for bound in self.bounds if not bound.is_met]
        if missed or not self.bounds:
            raise VerificationError(f"{'; '.join(missed) or 'nothing was compared'}. Nothing was published")


@dataclass(frozen=True)
class Verified:
    """Entries, the front model first, whose answers are PyTorch's as far as requested. Only `after` creates them."""

    entries: tuple[RepositoryEntry, ...]
    report: BuildReport
    passed: InitVar[object] = None

    def __post_init__(self, passed: object) -> None:
        if passed is not _PASSED:
            raise TypeError("a comparison makes entries Verified: use Verified.after")

    @classmethod
    def after(cls, comparison: Comparison, entries: Sequence[RepositoryEntry], report: BuildReport) -> Verified:
        """Return `entries` and their report, marked as verified. Raises VerificationError."""
        comparison.refuse()
        return cls(tuple(entries), replace(report, verified=True), _PASSED)


@dataclass(frozen=True)
class Unverified:
    """Entries, the front model first, of an engine that runs the checkpoint as it is: nothing was compared."""

    entries: tuple[RepositoryEntry, ...]
    report: BuildReport

    def __post_init__(self) -> None:
        if self.report.verified:
            raise TypeError("the report of entries that were compared with nothing says that they are verified")
