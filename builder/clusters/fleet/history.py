"""History of builds on this machine: one line per build in the user's cache. A lost file costs an estimate, no more."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from builder.building.keys import ORDER
from builder.clusters.fleet.executor import BuildOutcome
from builder.common.cache.folder import cache_home, is_cache_disabled
from builder.options import BuildSpec

FILE = "builds.jsonl"
MAX_LINES = 20_000  # lines that are read, the newest
MAX_SIMILAR = 50  # the most recent builds of a kind and size, by which the next is estimated
BASE_MEMORY = 950_000_000  # bytes of a process that builds, without its weights
# Bytes per byte of weights: MiniLM took 2.5, a llama in 16 bits 2.2, GPT-2 in fp32 1.2. Another engine that has the
# weights at the same time takes fp32 for a checkpoint of 16 bits.
MEMORY_PER_WEIGHT, MEMORY_PER_FURTHER_ENGINE = 2.5, 2.0


@dataclass(frozen=True)
class PastBuild:
    """One past build: `weights` and `memory` in bytes; `kind`: the options that decide its amount of work."""

    name: str
    kind: str
    weights: int
    seconds: float
    memory: int

    @property
    def size(self) -> int:
        return _size(self.weights)


@dataclass(frozen=True)
class BuildEstimate:
    """Estimate of a build. `seconds`: None if no similar build is known; `memory`: bytes."""

    seconds: float | None
    memory: int


@dataclass(frozen=True)
class BuildWork:
    """Work of a build: the `options` that decide how long it takes, and bytes of `weights`, 0 if they are on the Hub.

    `engines`: how many have the weights in memory at the same time, because they are measured by turns.
    """

    name: str
    options: str
    weights: int
    engines: int

    def after(self, stage: str | None) -> str:
        """Return the kind of a build that begins after `stage`, because the cache has that stage's result."""
        return f"{self.options} after {stage}"


def work_of(spec: BuildSpec) -> BuildWork:
    """Return the work of building `spec`."""
    pruned = "pruned" if spec.prune is not None else "whole"
    options = " ".join(map(str, (spec.target, spec.precision, spec.engine, spec.level, pruned)))
    weights = sum(map(_weights_of, filter(None, (spec.model, spec.draft))))
    return BuildWork(spec.entry_name, options, weights, 2 if spec.engine == "auto" else 1)


class History:
    """Builds of this machine, the oldest first."""

    def __init__(self) -> None:
        self.path = cache_home() / FILE
        self.own: dict[tuple[str, str, int], PastBuild] = {}
        self.similar: defaultdict[tuple[str, int], list[PastBuild]] = defaultdict(list)
        lines: list[str] = []
        with suppress(OSError):
            lines = self.path.read_text("utf-8", errors="replace").splitlines()
        for line in lines[-MAX_LINES:]:
            with suppress(ValueError, TypeError):  # a full disk or a killed process cut the line
                self._add(PastBuild(**json.loads(line)))

    def record(self, work: BuildWork, outcome: BuildOutcome) -> None:
        """Record what a build took; in this process alone if the cache is off."""
        cached = {} if outcome.report is None else outcome.report.kept
        furthest = next((stage for stage in reversed(ORDER) if stage in cached), None)
        past = PastBuild(work.name, work.after(furthest), work.weights, round(outcome.seconds, 3), outcome.memory)
        self._add(past)
        if is_cache_disabled():
            return
        with suppress(OSError):  # a full or read-only disk
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(asdict(past)) + "\n")

    def estimate(self, work: BuildWork, stage: str | None = None) -> BuildEstimate:
        """Estimate a build by its own last one, else by those of its kind and size of weights, else by its size alone.

        `stage`: the build begins after it, because the cache has its result. If no such build is known, one that begins
        with the first stage gives an upper bound.
        """
        weights = work.weights
        for of_kind in dict.fromkeys((work.after(stage), work.after(None))):
            own = self.own.get((work.name, of_kind, _size(weights)))
            builds = self.similar[of_kind, _size(weights)] if own is None else [own]
            if builds:
                seconds, memory = [past.seconds for past in builds], [past.memory for past in builds]
                return BuildEstimate(statistics.median(seconds), max(memory))
        per_weight = MEMORY_PER_WEIGHT + MEMORY_PER_FURTHER_ENGINE * (work.engines - 1)
        return BuildEstimate(None, BASE_MEMORY + round(per_weight * weights))

    def _add(self, past: PastBuild) -> None:
        self.own[past.name, past.kind, past.size] = past
        similar = self.similar[past.kind, past.size]
        similar.append(past)
        del similar[:-MAX_SIMILAR]


def _size(weights: int) -> int:
    """Return a class of size: weights of one class differ by less than a factor of two."""
    return weights.bit_length()


def _weights_of(model: str) -> int:
    """Return the bytes of the weights in a folder, or in the Hub's cache; 0 if they are still on the Hub."""
    folder = Path(model).expanduser()
    if not folder.is_dir():
        from huggingface_hub.constants import HF_HUB_CACHE, REPO_ID_SEPARATOR

        folder = Path(HF_HUB_CACHE) / REPO_ID_SEPARATOR.join(["models", *model.split("/")]) / "snapshots"
    return sum(file.stat().st_size for file in folder.rglob("*.safetensors"))
