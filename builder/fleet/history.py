"""What builds took, on this machine: one line a build in the user's cache. A lost file costs an estimate, no more."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from builder.cache.folder import cache_home
from builder.cache.stage_keys import ORDER
from builder.fleet.executor import Outcome
from builder.spec import BuildSpec

FILE = "builds.jsonl"
KEPT = 20_000  # lines that are read, the newest
RECENT = 50  # builds of a kind and size that say how long another takes
BASE = 950_000_000  # bytes of a process that builds, beside what its weights take
TIMES = 2.5  # of the checkpoint's weights: measured were MiniLM 2.5, a llama in 16 bits 2.2, GPT-2 in fp32 1.2
MORE = 2.0  # of them for another engine that has them at the same time: fp32 where the checkpoint has 16 bits


@dataclass(frozen=True)
class Past:
    """One build that was: `weights` and `memory` in bytes; `kind`: what decides how much there is to do."""

    name: str
    kind: str
    weights: int
    seconds: float
    memory: int

    @property
    def size(self) -> int:
        return _size(self.weights)


@dataclass(frozen=True)
class Expected:
    """What a build will take. `seconds`: None where no build like it is known; `memory`: bytes."""

    seconds: float | None
    memory: int


@dataclass(frozen=True)
class Work:
    """What decides how long a build takes: `options` of it, and bytes of `weights`, 0 where they are on the Hub.

    `engines`: how many have the weights in memory at the same time, because they are measured by turns.
    """

    name: str
    options: str
    weights: int
    engines: int

    def after(self, stage: str | None) -> str:
        """The kind of a build that begins after `stage`, because the cache has what that made."""
        return f"{self.options} after {stage}"


def work_of(spec: BuildSpec) -> Work:
    """The work that `spec` is."""
    pruned = "pruned" if spec.prune is not None else "whole"
    options = " ".join(map(str, (spec.target, spec.precision, spec.engine, spec.level, pruned)))
    weights = sum(map(_weights_of, filter(None, (spec.model, spec.draft))))
    return Work(spec.entry_name, options, weights, 2 if spec.engine == "auto" else 1)


class History:
    """The builds of this machine, the oldest first."""

    def __init__(self) -> None:
        self.path = cache_home() / FILE
        self.own: dict[tuple[str, str, int], Past] = {}
        self.alike: defaultdict[tuple[str, int], list[Past]] = defaultdict(list)
        for line in _lines(self.path)[-KEPT:]:
            with suppress(ValueError, TypeError):  # a full disk, or whoever was killed, cut it
                self._add(Past(**json.loads(line)))

    def remember(self, work: Work, outcome: Outcome) -> None:
        """What a build took."""
        cached = {} if outcome.report is None else outcome.report.kept
        furthest = next((stage for stage in reversed(ORDER) if stage in cached), None)
        past = Past(work.name, work.after(furthest), work.weights, round(outcome.seconds, 3), outcome.memory)
        self._add(past)
        with suppress(OSError):  # a full or read-only disk
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(asdict(past)) + "\n")

    def expected(self, work: Work, stage: str | None = None) -> Expected:
        """By its own last build, else by those of its kind with weights of that size, else by its size alone.

        `stage`: after which it begins, because the cache has what that made. Where no such build is known, one
        that begins with the first says how long it takes at most.
        """
        weights = work.weights
        for of_kind in dict.fromkeys((work.after(stage), work.after(None))):
            own = self.own.get((work.name, of_kind, _size(weights)))
            builds = self.alike[of_kind, _size(weights)] if own is None else [own]
            if builds:
                seconds, memory = [past.seconds for past in builds], [past.memory for past in builds]
                return Expected(statistics.median(seconds), max(memory))
        return Expected(None, BASE + round((TIMES + MORE * (work.engines - 1)) * weights))

    def _add(self, past: Past) -> None:
        self.own[past.name, past.kind, past.size] = past
        alike = self.alike[past.kind, past.size]
        alike.append(past)
        del alike[:-RECENT]


def _lines(path: Path) -> list[str]:
    """Those of a file; none where it cannot be read."""
    try:
        return path.read_text("utf-8", errors="replace").splitlines()
    except OSError:
        return []


def _size(weights: int) -> int:
    """The same of weights of which the larger are less than twice the smaller, mostly."""
    return weights.bit_length()


def _weights_of(model: str) -> int:
    """Bytes of the checkpoint's weights; 0 where they are still on the Hub."""
    folder = Path(model).expanduser()
    return sum(file.stat().st_size for file in _folder(folder, model).rglob("*.safetensors"))


def _folder(folder: Path, model: str) -> Path:
    """Where the Hub's library keeps what it has of a Hub id, if that is no folder here."""
    if folder.is_dir():
        return folder
    from huggingface_hub.constants import HF_HUB_CACHE, REPO_ID_SEPARATOR

    return Path(HF_HUB_CACHE) / REPO_ID_SEPARATOR.join(["models", *model.split("/")]) / "snapshots"
