"""What a build found out, for build.json, for --json and for the table on the screen."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.table import Table

from builder.errors import RepositoryError
from builder.repository.layout import RepositoryEntry
from builder.verify.latency import Latencies, speed_up

PACKAGES = ("torch", "transformers", "tokenizers", "onnx", "onnxruntime", "openvino", "optimum", "numpy")


@dataclass(frozen=True)
class Rung:
    """One step of the ladder: how large, how fast, how true."""

    name: str
    size: int  # bytes
    latency_ms: Latencies
    error: float | None = None  # largest relative error of the graph against PyTorch; None: faster ones were enough
    quality: float | None = None  # mean agreement on the samples
    worst: float | None = None
    batch_agreement: float | None = None
    perplexity: float | None = None  # on the samples, of a model that generates
    tokens: float | None = None  # share of PyTorch's tokens that are the most probable here too, of a model that reads
    answers: float | None = None  # and share of its answers that are the same token for token
    scores: dict[str, float] = field(default_factory=dict)  # the task's own measures by the samples' labels, 0 to 1


@dataclass(frozen=True)
class EngineCheck:
    """What came of the samples' calls on the engine that is to serve. `note` says why, where they were not made."""

    engine: str
    version: str
    where: str
    verified: bool
    calls: int = 0
    error: float | None = None  # the largest difference to this build's own engine, as a share of the largest value
    python: str | None = None
    note: str | None = None

    def __str__(self) -> str:
        if not self.verified:
            return f"{self.note} on {self.where}, {self.version}"
        found = f"{self.calls} calls, off by {self.error:.0e}" if self.note is None else self.note
        return f"verified on {self.where}, {self.version} ({found})"


@dataclass(frozen=True)
class BuildReport:
    """Everything that was decided and measured, in the order of the stages."""

    name: str
    task: str
    triton: str
    checkpoint: dict[str, Any]
    versions: dict[str, str]
    cpu: dict[str, Any]
    attention: dict[str, int]
    operators: dict[str, int]
    quantised: dict[str, Any] | None
    ladder: tuple[Rung, ...]
    metric: str
    threshold: float
    samples: int
    padding: float
    warnings: tuple[str, ...]
    files: dict[str, dict[str, str]]
    target: str = "cpu"
    plan: dict[str, Any] | None = None  # what a TensorRT plan was compiled for, once it is
    memory: dict[str, int] | None = None  # bytes, of a model that keeps a cache
    choice: str | None = None  # what a search chose, and why
    gate: str | None = None  # what the threshold is of, where it is not of `metric`
    chosen: str | None = None  # the rung that is served
    engine: str = "onnxruntime"
    removed: dict[str, dict[str, int]] = field(default_factory=dict)  # heads and neurons taken out, and why
    verified_on: tuple[EngineCheck, ...] = ()  # the engines that are to serve it
    tuned_for: tuple[str, ...] = ()  # instruction sets of this CPU, of which the graph wants one

    def document(self) -> dict[str, Any]:
        """As JSON. The folder it was published into is not in it: a repository may be moved."""
        return asdict(self)

    def table(self) -> Table:
        """The ladder, a rung a row: size, speed over PyTorch, two latencies, quality; the one that is served marked."""
        base = self.ladder[0]
        timed = list(base.latency_ms)  # nothing, where the machine that serves is another
        cells = list(dict.fromkeys([*timed[:1], *timed[-1:]]))
        columns: dict[str, list[str]] = {
            "MB": [f"{rung.size / 1e6:.1f}" for rung in self.ladder],
            "speed": [f"{speed_up(rung.latency_ms, base.latency_ms):.1f}x" if timed else "-" for rung in self.ladder],
            **{f"{cell}, ms": [f"{rung.latency_ms[cell]:.2f}" for rung in self.ladder] for cell in cells},
            "error": [_number(rung.error, ".0e") for rung in self.ladder],
            self.metric: [_number(rung.quality, ".4f") for rung in self.ladder],
            "worst": [_number(rung.worst, ".4f") for rung in self.ladder],
            "batched": [_number(rung.batch_agreement, ".4f") for rung in self.ladder],
            "perplexity": [_number(rung.perplexity, ".4f") for rung in self.ladder],
            "next token": [_number(rung.tokens, ".4f") for rung in self.ladder],
            "same answer": [_number(rung.answers, ".4f") for rung in self.ladder],
        }
        for name in base.scores:
            columns[name] = [_number(rung.scores.get(name), ".4f") for rung in self.ladder]
        shown = {title: values for title, values in columns.items() if set(values[1:] or values) != {"-"}}
        table = Table(title=f"{self.name}: {self.task}, {self.samples} samples", title_justify="left")
        table.add_column("", no_wrap=True)
        for title in shown:
            table.add_column(title, justify="right")
        for rung, *values in zip(self.ladder, *shown.values(), strict=True):
            style = "bold" if rung.name == self.chosen else None
            table.add_row(rung.name, *values, style=style)
        table.caption, table.caption_justify = "\n".join(map(str, self.verified_on)) or None, "left"
        return table


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else f"{value:{form}}"


def read_report(repository: Path, name: str) -> BuildReport:
    """The report of a model that was published. Raises RepositoryError."""
    path = repository / name / "build.json"
    try:
        document = json.loads(path.read_text("utf-8"))
        tuples = {name: tuple(document[name]) for name in ("warnings", "tuned_for")}
        rungs = tuple(Rung(**rung) for rung in document["ladder"])
        checks = tuple(EngineCheck(**check) for check in document["verified_on"])
        return BuildReport(**{**document, **tuples, "ladder": rungs, "verified_on": checks})
    except FileNotFoundError:
        known = ", ".join(sorted(p.parent.name for p in repository.glob("*/build.json"))) or "no model"
        raise RepositoryError(f"{repository} has no build.json of {name}; it has {known} (--repository)") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RepositoryError(f"{path} is not a report of this version ({error}); build the model again") from error


def versions() -> dict[str, str]:
    """The packages that made the graph."""
    return {package: version(package) for package in PACKAGES}


def file_hashes(entries: Sequence[RepositoryEntry]) -> dict[str, dict[str, str]]:
    """SHA-256 of each file of each entry."""
    return {
        entry.name: {
            name: hashlib.sha256(content if isinstance(content, bytes) else content.read_bytes()).hexdigest()
            for name, content in sorted(entry.files.items())
        }
        for entry in entries
    }
