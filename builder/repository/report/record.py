"""Report of a build: its decisions and measurements, as build.json and `--json` have them.

A front's configuration has a summary of a few hundred bytes as its parameter `report`, for clients that speak to Triton
alone.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

from builder.common.engines import ENGINES
from builder.common.errors import RepositoryError
from builder.common.hashing import WRITTEN_DIGESTS, sha256_of
from builder.common.speed import PROCESS_STARTED, Latencies, speed_up

if TYPE_CHECKING:
    from rich.table import Table

    from builder.repository.config.entries import RepositoryEntry

REPORT = "build.json"
SUMMARY = "report"  # parameter of a front's configuration
_ENGINES = tuple(
    facts.package for facts in ENGINES.values() if facts.is_installed and facts.package and not facts.is_missing()
)
PACKAGES = ("torch", "transformers", "tokenizers", "onnx", *_ENGINES, "optimum", "numpy")
NOT_COMPARED = (
    "no speed-up where the cache has the times of an earlier build: times of different moments are not compared; "
    "BUILD_REPO_CACHE=off measures all of them again"
)


@dataclass(frozen=True)
class MeasuredVariant:
    """One variant that was built and measured. None: not measured.

    A variant slower than one that is good enough is not judged; one that misses the quality on some samples by much is
    judged on those alone.
    """

    name: str
    """Precision and engine, such as "int8-static OpenVINO"."""
    size: int
    """Bytes of the graph and its weights."""
    latency_ms: Latencies
    """Median milliseconds by shape, such as "8x128" for 8 rows of 128 tokens."""
    error: float | None = None
    """Largest relative error of the graph's outputs against PyTorch."""
    quality: float | None = None
    """Mean agreement with PyTorch on the samples, 0 to 1."""
    worst: float | None = None
    """Agreement of the worst sample, 0 to 1."""
    batch_agreement: float | None = None
    """Mean agreement of each answer alone with the same answer in a batch."""
    perplexity: float | None = None
    """Perplexity on the samples. Models that generate."""
    tokens: float | None = None
    """Share of positions whose most probable token is PyTorch's. Encoder-decoders."""
    answers: float | None = None
    """Share of answers that equal PyTorch's token for token. Encoder-decoders."""
    ranking: dict[str, float] = field(default_factory=dict)
    """How alike the answers rank the samples as PyTorch's do, by measure, 1 is equal. Embedders and rankers."""
    scores: dict[str, float] = field(default_factory=dict)
    """The task's own measures by labels, 0 to 1: on --budget's data with that, otherwise on the samples."""
    interval: dict[str, tuple[float, float]] = field(default_factory=dict)
    """95 % confidence interval of the difference of a score to PyTorch's, by measure, on --budget's data."""
    judged_samples: int | None = None
    """Samples on which it missed the quality by so much that it was not judged on the others; None: on all."""
    timed_in: str = PROCESS_STARTED
    """Start of the process that measured the latencies (UTC)."""

    @property
    def measures(self) -> dict[str, float]:
        """Measures over all samples: of ranking, then those by labels."""
        return {**self.ranking, **self.scores}

    def in_words(self, measure: str) -> str:
        """Return a measure, with the interval of its difference to PyTorch's if it has one; "-" if it was not taken."""
        if measure not in self.measures:
            return "-"
        interval = " ({:+.4f} to {:+.4f})".format(*self.interval[measure]) if measure in self.interval else ""
        return f"{self.measures[measure]:.4f}{interval}"

    def speed_up(self, base: MeasuredVariant) -> float | None:
        """Return how many times faster than `base` this is; None if one has no times, or other processes timed them."""
        if not self.latency_ms or not base.latency_ms or self.timed_in != base.timed_in:
            return None
        return speed_up(self.latency_ms, base.latency_ms)


@dataclass(frozen=True)
class EngineCheck:
    """Result of the samples' calls on the engine that will serve. `note`: why they were not made."""

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
        result = f"{self.calls} calls, off by {self.error:.0e}" if self.note is None else self.note
        return f"verified on {self.where}, {self.version} ({result})"


@dataclass(frozen=True)
class BuildReport:
    """Everything that a build decided and measured: the content of build.json."""

    name: str
    """Name of the model in Triton."""
    task: str
    """Task that it serves."""
    triton: str
    """Triton release that it was built for."""
    engine: str
    """Engine that runs the model."""
    checkpoint: dict[str, Any]
    """Source, revision, model type and hash of the weights; licence and origin according to its card."""
    versions: dict[str, str]
    """Packages that made the graph."""
    cpu: dict[str, Any]
    """Processor that it was built and measured on."""
    attention: dict[str, int]
    """Attention layers, and how many of them are fused."""
    operators: dict[str, int]
    """Fused operators that a call runs, by name; of two branches, those of one."""
    quantised: dict[str, Any] | None
    """Quantised operators, and those left in fp32."""
    variants: tuple[MeasuredVariant, ...]
    """Every variant that was measured; PyTorch first."""
    metric: str
    """Name of the measure that a variant's `quality` is in."""
    threshold: float
    """Lowest quality that may be published."""
    samples: int
    """Number of samples that variants were judged on."""
    padding: float
    """Share of padding among the tokens of the samples, as the front model cuts them."""
    warnings: tuple[str, ...]
    """Shortcomings of the published model that its users should know."""
    files: dict[str, dict[str, str]]
    """SHA-256 of every file, by model and path."""
    target: str = "cpu"
    """Device that it runs on: cpu, cuda or tensorrt."""
    gpu: str | None = None
    """Card that it was built for, if one was named (--gpu)."""
    plan: dict[str, Any] | None = None
    """Machine and TensorRT that a plan was compiled for, once it is compiled."""
    memory: dict[str, int] | None = None
    """Bytes by purpose: of an instance of an encoder on a CPU, or of a generating model."""
    choice: str | None = None
    """Choice of --precision auto, and its reason."""
    gate: str | None = None
    """Measure that `threshold` applies to, if that is not `metric`."""
    chosen: str | None = None
    """Name of the variant that is served."""
    removed: dict[str, dict[str, int]] = field(default_factory=dict)
    """Heads and neurons that were removed, by reason."""
    verified_on: tuple[EngineCheck, ...] = ()
    """Results of the samples' calls on the engines that are to serve."""
    verified: bool = False
    """True if the answers were compared with PyTorch's and are right."""
    samples_file: dict[str, str] | None = None
    """Name and SHA-256 of the user's own samples; None if the builder's were used."""
    budget: dict[str, str] | None = None
    """What --budget allowed, and the name, kind, count and SHA-256 of the data that it was measured on."""
    graph_files: dict[str, str] = field(default_factory=dict)
    """SHA-256 of each file of the user's own graph, by name, the graph first; empty if the checkpoint was exported."""
    version: int = 1
    """Version of the model in its repository."""
    build_key: str | None = None
    """Hash of all that the build depended on; None if an earlier build-repo, without such keys, made it."""
    kept: dict[str, dict[str, str]] = field(default_factory=dict)
    """Stages that an earlier build did with the same key: the key of each, and when it ran (UTC)."""
    tuned_for: tuple[str, ...] = ()
    """Instruction sets of the processor that the choice rests on; a machine that serves should have one of them."""
    draft: dict[str, Any] | None = None
    """Draft model: its checkpoint, the variant of it that is served, and its stages that were kept."""
    settings: str | None = None
    """Settings that `build-repo tune` changed after the build, without another one, and why."""

    @property
    def served(self) -> MeasuredVariant:
        """Variant that is served; the last one, if the report does not say."""
        return next((variant for variant in self.variants if variant.name == self.chosen), self.variants[-1])

    def quality_in_words(self, variant: MeasuredVariant) -> str:
        """Return the quality of a variant, with the number of its samples if it missed on some; "-" if not judged."""
        if variant.quality is None:
            return "-"
        some = "" if variant.judged_samples is None else f" ({variant.judged_samples} of {self.samples} samples)"
        return f"{variant.quality:.4f}{some}"

    @property
    def ladder(self) -> tuple[MeasuredVariant, ...]:
        """Variants, by the name that they had before version 0.4 and still have in build.json."""
        return self.variants

    @property
    def has_times_of_other_builds(self) -> bool:
        """True if the cache gave times of a variant or of PyTorch, so that some have no speed-up."""
        return len({variant.timed_in for variant in self.variants if variant.latency_ms}) > 1

    @property
    def verdict(self) -> str:
        """Sentence that says if the model was verified, and against what."""
        if not self.verified:
            return f"not verified: {self.engine} runs the checkpoint as it is; its answers were compared with nothing"
        on = f"the CPU of the machine that built it ({self.cpu['model']})"
        return f"verified: {self.chosen} against PyTorch {self.versions['torch']} on {on}"

    def document(self) -> dict[str, Any]:
        """Return the report as an object of JSON, in which the variants are called `ladder`.

        It does not name the folder it was published into, because a repository may be moved.
        """
        return {"ladder" if name == "variants" else name: value for name, value in asdict(self).items()}

    def to_json(self) -> str:
        """Return the text of build.json."""
        return json.dumps(self.document(), indent=1, ensure_ascii=False)

    def table(self) -> Table:
        """Return the table of the variants for the screen."""
        from builder.repository.report.table import report_table  # imports rich

        return report_table(self)


def read_report(repository: Path, name: str) -> BuildReport:
    """Return the report of a published model. Raises RepositoryError."""
    path = repository / name / REPORT
    if path.exists() and not path.is_file():  # the data of a FIFO may never come
        raise RepositoryError(f"{path} is not a file")
    try:
        return parse_report(path.read_bytes(), str(path))
    except FileNotFoundError:
        known = ", ".join(sorted(p.parent.name for p in repository.glob(f"*/{REPORT}"))) or "no model"
        raise RepositoryError(f"{repository} has no {REPORT} of {name}; it has {known} (--repository)") from None
    except OSError as error:
        raise RepositoryError(f"{path} cannot be read ({error.strerror})") from error


def parse_report(text: bytes, where: str) -> BuildReport:
    """Return the report in a build.json. Raises RepositoryError if another version of build-repo wrote it."""
    try:
        document = json.loads(text)
        tuples = {name: tuple(document[name]) for name in ("warnings", "tuned_for")}
        kept = bool(document.get("kept", True))
        variants = tuple(_read_variant(variant, kept) for variant in document.pop("ladder"))
        if type(document["verified"]) is not bool:
            raise TypeError("verified is not true or false")
        checks = tuple(EngineCheck(**check) for check in document["verified_on"])
        return BuildReport(**{**document, **tuples, "variants": variants, "verified_on": checks})
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise RepositoryError(f"{where} is not a report of this version ({error}); build the model again") from error


def _read_variant(document: dict[str, Any], kept: bool) -> MeasuredVariant:
    """Return a variant of build.json.

    Releases before `timed_in` did not write which process measured. Unless the build ran all stages itself (`kept` is
    false), the times may be those of an earlier build, and get no speed-up.
    """
    return MeasuredVariant(**{"timed_in": document["name"] if kept else "", **document})


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file, such as build.json; an empty one if it is missing or cannot be read."""
    try:
        document = json.loads(path.read_text("utf-8")) if path.is_file() else {}  # the data of a FIFO may never come
    except (OSError, ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}


def checkpoint_source(report: Path) -> str | None:
    """Return the checkpoint that the model of a build.json was built from; None if the file does not say."""
    checkpoint = read_object(report).get("checkpoint")
    return str(checkpoint["source"]) if isinstance(checkpoint, dict) and "source" in checkpoint else None


def package_versions(packages: Sequence[str] = PACKAGES) -> dict[str, str]:
    """Return the installed versions of the packages that make graphs."""
    return {package: importlib.metadata.version(package) for package in packages}


def samples_file(path: Path | None) -> dict[str, str] | None:
    """Return the name and hash of the user's file of samples; None if the builder's own samples are used."""
    return None if path is None else {"name": path.name, "sha256": sha256_of(path)}


def file_hashes(entries: Sequence[RepositoryEntry]) -> dict[str, dict[str, str]]:
    """Return the SHA-256 of each file of each entry."""
    return {
        entry.name: {
            name: hashlib.sha256(content).hexdigest() if isinstance(content, bytes) else WRITTEN_DIGESTS.of(content)
            for name, content in sorted(entry.files.items())
        }
        for entry in entries
    }


def summary(report: BuildReport, day: date) -> dict[str, Any]:
    """Return the served variant beside PyTorch. Times are medians in milliseconds by shape, sizes in bytes."""
    pytorch, served = report.variants[0], report.served
    cells = list(served.latency_ms)
    shown = dict.fromkeys([*cells[:1], *cells[-1:]])
    speed = served.speed_up(pytorch)
    timed = {} if speed is None else {"speed_up": round(speed, 2)}
    return {
        "variant": served.name,
        "engine": report.engine,
        "target": report.target,
        "triton": report.triton,
        "size": served.size,
        **({} if report.memory is None else {"memory": sum(report.memory.values())}),
        **timed,
        "latency_ms": {cell: float(f"{served.latency_ms[cell]:.3g}") for cell in shown},
        "metric": report.metric,
        "quality": served.quality,
        "samples": report.samples,
        "cpu": report.cpu["model"],
        "measured": day.isoformat(),
    }


def with_summary(entries: Sequence[RepositoryEntry], report: BuildReport) -> tuple[RepositoryEntry, ...]:
    """Return `entries`, the front model first, with the summary in the front's configuration."""
    front, *others = entries
    document = json.dumps(summary(report, date.today()), ensure_ascii=False, separators=(",", ":"))
    config = replace(front.config, parameters={**front.config.parameters, SUMMARY: document})
    return replace(front, config=config), *others
