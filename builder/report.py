"""What a build found out, for build.json, for --json and for the table on the screen."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from typing import Any

from rich.table import Table

from builder.repository.layout import RepositoryEntry
from builder.verify.latency import Latencies

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
    memory: dict[str, int] | None = None  # bytes, of a model that keeps a cache
    choice: str | None = None  # what a search chose, and why
    chosen: str | None = None  # the rung that is served
    engine: str = "onnxruntime"
    removed: dict[str, dict[str, int]] = field(default_factory=dict)  # heads and neurons taken out, and why
    tuned_for: tuple[str, ...] = ()  # instruction sets of this CPU that the choice of the graph rests on

    def document(self) -> dict[str, Any]:
        """As JSON. The folder it was published into is not in it: a repository may be moved."""
        return asdict(self)

    def table(self) -> Table:
        """The ladder: each rung's size, latency (batch x length, speed-up over PyTorch), error and quality."""
        base = self.ladder[0]
        table = Table(title=f"{self.name}: {self.task}, {self.samples} samples", title_justify="left")
        table.add_column("")
        for rung in self.ladder:
            table.add_column(rung.name, justify="right")
        table.add_row("size, MB", *(f"{rung.size / 1e6:.1f}" for rung in self.ladder))
        for cell in base.latency_ms:
            times = [(rung.latency_ms[cell], base.latency_ms[cell] / rung.latency_ms[cell]) for rung in self.ladder]
            table.add_row(f"{cell}, ms", *(f"{ms:.2f} ({ratio:.1f}x)" for ms, ratio in times))
        for title, values, form in (
            ("largest error of the graph", [rung.error for rung in self.ladder], ".1e"),
            (f"{self.metric}, mean", [rung.quality for rung in self.ladder], ".4f"),
            (f"{self.metric}, worst", [rung.worst for rung in self.ladder], ".4f"),
            ("same alone and batched", [rung.batch_agreement for rung in self.ladder], ".4f"),
        ):
            table.add_row(title, "reference", *("-" if value is None else f"{value:{form}}" for value in values[1:]))
        if base.perplexity is not None:
            table.add_row("perplexity", *(f"{rung.perplexity:.4f}" for rung in self.ladder))
        for title, values in (
            ("next-token agreement", [rung.tokens for rung in self.ladder]),
            ("same answer", [rung.answers for rung in self.ladder]),
        ):
            if any(value is not None for value in values):
                table.add_row(title, *("reference" if value is None else f"{value:.4f}" for value in values))
        return table


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
