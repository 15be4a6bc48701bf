"""What a build found out, for build.json, for --json and for the table on the screen."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.table import Table

from builder.repository.layout import RepositoryEntry
from builder.verify.latency import Latencies

PACKAGES = ("torch", "transformers", "tokenizers", "onnx", "onnxruntime", "optimum", "numpy")
CPU_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx_vnni", "avx512_bf16", "amx_int8")


@dataclass(frozen=True)
class Rung:
    """One step of the ladder: how large, how fast, how true."""

    name: str
    size: int  # bytes
    latency_ms: Latencies
    error: float  # largest relative error of the graph against PyTorch
    quality: float  # mean agreement on the samples
    worst: float
    batch_agreement: float
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
        table.add_row("largest error of the graph", *(_unless_base(r, base, f"{r.error:.1e}") for r in self.ladder))
        table.add_row(f"{self.metric}, mean", *(_unless_base(r, base, f"{r.quality:.4f}") for r in self.ladder))
        table.add_row(f"{self.metric}, worst", *(_unless_base(r, base, f"{r.worst:.4f}") for r in self.ladder))
        table.add_row(
            "same alone and batched", *(_unless_base(r, base, f"{r.batch_agreement:.4f}") for r in self.ladder)
        )
        if base.perplexity is not None:
            table.add_row("perplexity", *(f"{rung.perplexity:.4f}" for rung in self.ladder))
        for title, values in (
            ("next-token agreement", [rung.tokens for rung in self.ladder]),
            ("same answer", [rung.answers for rung in self.ladder]),
        ):
            if any(value is not None for value in values):
                table.add_row(title, *("reference" if value is None else f"{value:.4f}" for value in values))
        return table


def _unless_base(rung: Rung, base: Rung, text: str) -> str:
    return "reference" if rung is base else text


def versions() -> dict[str, str]:
    """The packages that made the graph."""
    return {package: version(package) for package in PACKAGES}


def cpu() -> dict[str, Any]:
    """The processor that latencies were measured on, and the instruction sets that int8 speed depends on."""
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").is_file() else ""
    fields = dict(line.split(":", 1) for line in info.splitlines() if ":" in line)
    fields = {key.strip(): value.strip() for key, value in fields.items()}
    flags = fields.get("flags", "").split()
    return {"model": fields.get("model name", platform.processor()), "flags": [f for f in CPU_FLAGS if f in flags]}


def file_hashes(entries: Sequence[RepositoryEntry]) -> dict[str, dict[str, str]]:
    """SHA-256 of each file of each entry."""
    return {
        entry.name: {
            name: hashlib.sha256(content if isinstance(content, bytes) else content.read_bytes()).hexdigest()
            for name, content in sorted(entry.files.items())
        }
        for entry in entries
    }
