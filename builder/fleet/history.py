"""What builds took, on this machine: one line a build in the user's cache. A lost file costs an estimate, no more."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from builder.cache.folder import cache_home
from builder.fleet.executor import Outcome
from builder.spec import BuildSpec

FILE = "builds.jsonl"
KEPT = 20_000  # lines that are read, the newest
ALIKE = 2.0  # times as large, or as small: weights of a build that says how long another takes
BASE = 700_000_000  # bytes of a process with torch, transformers and ONNX Runtime that builds a tiny model
TIMES = 4  # the weights' bytes: PyTorch's, the export's, the graph that is verified, and what serialises it


@dataclass(frozen=True)
class Past:
    """One build that was: `weights` and `memory` in bytes; `kind`: the options that decide how much there is to do."""

    name: str
    kind: str
    weights: int
    seconds: float
    memory: int


@dataclass(frozen=True)
class Expected:
    """What a build will take. `seconds`: None where no build like it is known; `memory`: bytes."""

    seconds: float | None
    memory: int


class History:
    """The builds of this machine, the oldest first."""

    def __init__(self) -> None:
        self.path = cache_home() / FILE
        self.builds: list[Past] = []
        with suppress(OSError, ValueError, TypeError):  # a damaged file is as good as none
            lines = self.path.read_text("utf-8").splitlines()[-KEPT:]
            self.builds = [Past(**json.loads(line)) for line in lines]

    def remember(self, spec: BuildSpec, outcome: Outcome) -> None:
        """What the build of `spec` took."""
        past = Past(spec.entry_name, kind(spec), weights_of(spec), round(outcome.seconds, 3), outcome.memory)
        self.builds.append(past)
        with suppress(OSError):  # a full or read-only disk
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(asdict(past)) + "\n")

    def expected(self, spec: BuildSpec) -> Expected:
        """By its own last build, else by those of its kind with weights of about that size, else by its size alone."""
        weights = weights_of(spec)
        alike = [past for past in self.builds if past.kind == kind(spec) and _alike(past.weights, weights)]
        own = [past for past in alike if past.name == spec.entry_name]
        return _of(own[-1:] or alike) or Expected(None, BASE + TIMES * weights)


def _of(builds: Sequence[Past]) -> Expected | None:
    if not builds:
        return None
    return Expected(statistics.median(past.seconds for past in builds), max(past.memory for past in builds))


def _alike(one: int, other: int) -> bool:
    return one <= ALIKE * other and other <= ALIKE * one


def kind(spec: BuildSpec) -> str:
    """The options that decide how much there is to do."""
    return " ".join(map(str, (spec.target, spec.precision, spec.engine, spec.level, spec.prune is not None)))


def weights_of(spec: BuildSpec) -> int:
    """Bytes of the checkpoint's weights; 0 where they are still on the Hub."""
    folder = Path(spec.model).expanduser()
    return sum(file.stat().st_size for file in _folder(folder, spec).rglob("*.safetensors"))


def _folder(folder: Path, spec: BuildSpec) -> Path:
    """Where the Hub's library keeps what it has of a Hub id, if that is no folder here."""
    if folder.is_dir():
        return folder
    from huggingface_hub.constants import HF_HUB_CACHE, REPO_ID_SEPARATOR

    return Path(HF_HUB_CACHE) / REPO_ID_SEPARATOR.join(["models", *spec.model.split("/")]) / "snapshots"
