"""Interface of executors, which run many builds at once, and its messages. All of it pickles; no torch is imported."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from builder.options import BuildSpec
from builder.repository.report.record import BuildReport


@dataclass(frozen=True)
class BuildJob:
    """One build.

    `memory`: bytes that its process is expected to take at most, PyTorch included; `cores`: those that it keeps busy,
    at least 1; `before`: the newest version when it was planned, 0 for none.
    """

    spec: BuildSpec
    memory: int
    cores: int = 1
    before: int = 0

    @property
    def name(self) -> str:
        """Name of the model: no two jobs of a run have the same."""
        return self.spec.entry_name


@dataclass(frozen=True)
class BuildProgress:
    """Report that a build of the model `name` has reached a stage.

    `worker`: a short name of where it runs, for a line of its own in the view.
    """

    name: str
    worker: str
    stage: str


@dataclass(frozen=True)
class BuildOutcome:
    """End of a build: with a `report` of the published version, or with an `error` in a line or two.

    `seconds`: its duration; `stages`: the seconds of each stage by name, empty if another run had built the same
    meanwhile; `memory`: the peak resident bytes of its process; `details`: the traceback of an unforeseen error.
    """

    name: str
    worker: str
    seconds: float
    memory: int = 0
    report: BuildReport | None = None
    error: str | None = None
    stages: Mapping[str, float] = field(default_factory=dict)
    details: str = ""


class Executor(Protocol):
    """Executor that builds jobs on workers, as many at once as memory and cores allow."""

    def run(self, jobs: Sequence[BuildJob]) -> Generator[BuildProgress | BuildOutcome, None, None]:
        """Build the jobs, the first ones first, and yield any number of BuildProgress and one BuildOutcome per job.

        A failed build or a dead worker is a BuildOutcome with an error, and does not stop the other builds. Closing the
        iterator stops all builds that run. Raises BuilderError if there is no worker at all.
        """
        ...
