"""Results of the stages of an encoder, and the comparison and report of the last one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from builder.building.families import MAPPED, UNTIMED, built_from, code_not_run
from builder.building.variants.encoder import ROUNDING
from builder.building.variants.evaluator import Evaluator
from builder.building.variants.selection import Selection
from builder.building.verify.parity import TOLERANCE, BatchReference
from builder.building.verify.quality import SERVED_TOLERANCE, Quality
from builder.checkpoints.checkpoint import Checkpoint
from builder.checkpoints.tasks.base import encoder_task, one_pipeline
from builder.common.machine import cpu
from builder.engines.encoding import Variant
from builder.engines.optimise import Quantised
from builder.engines.optimise.compaction import Removed
from builder.graphs.export.encoder import Export
from builder.graphs.export.experts import cost_of_experts
from builder.graphs.onnx.graph import Graph
from builder.graphs.onnx.operators import FUSED
from builder.options import BuildSpec
from builder.repository.config.entries import RepositoryEntry
from builder.repository.report.record import BuildReport, MeasuredVariant, file_hashes
from builder.repository.verdict import Comparison, ParityBound


@dataclass(frozen=True)
class ExportedEncoder:
    """Export, with PyTorch's answers to long rows from before it."""

    export: Export
    long: tuple[BatchReference, ...]


@dataclass(frozen=True)
class FusedEncoder:
    """Graph without operators that do nothing, and its fused form."""

    exported: ExportedEncoder
    compacted: Graph
    graph: Graph
    empty: Removed | None


@dataclass(frozen=True)
class VerifiedEncoder:
    """Fused graph whose answers equal the reference's.

    `mapped`: the graph was judged and timed with its weights left in their file, unlike the served one.
    """

    fused: FusedEncoder
    evaluator: Evaluator
    pytorch: MeasuredVariant
    measured: MeasuredVariant
    quality: Quality
    mapped: bool

    @property
    def error(self) -> float:
        """Largest relative error against PyTorch."""
        return math.inf if self.measured.error is None else self.measured.error


@dataclass(frozen=True)
class SelectedEncoder:
    """Variant that is served, of those that were measured."""

    exact: VerifiedEncoder
    selection: Selection[Variant]
    quantised: Quantised
    quality: Quality
    variants: tuple[MeasuredVariant, ...]
    threshold: float
    pruned: Removed | None
    is_cacheable: bool

    @property
    def graph(self) -> Graph:
        return self.quantised.graph


def comparison_of(chosen: SelectedEncoder) -> Comparison:
    """Compare the fused graph number by number and as it is served; then the variant by its quality."""
    exact = chosen.exact
    measured = chosen.selection.chosen.measured
    quality, ranking = exact.evaluator.relative_quality(measured), exact.evaluator.min_ranking
    return Comparison(
        (
            ParityBound("the error of the fused graph", exact.error, at_most=TOLERANCE),
            ParityBound("the error of the answers in fp32", exact.quality.error, at_most=SERVED_TOLERANCE),
            ParityBound(f"the {exact.evaluator.metric}", quality, at_least=chosen.threshold - ROUNDING),
            *(
                ParityBound(f"the {name}", measured.ranking[name], at_least=least)
                for name, least in ranking.items()
                if name in measured.ranking
            ),
        )
    )


def report_of(
    spec: BuildSpec,
    checkpoint: Checkpoint,
    chosen: SelectedEncoder,
    entries: Sequence[RepositoryEntry],
    memory: dict[str, int] | None,
    given: Mapping[str, str],
) -> BuildReport:
    """Return the report of everything that was decided and measured.

    `memory`: bytes of one instance, by purpose. `given`: SHA-256 of the files of --graph, by name.
    """
    exact, selection = chosen.exact, chosen.selection
    exported, evaluator, operators = exact.fused.exported.export, exact.evaluator, chosen.graph.operators
    parts = {
        "matmuls": chosen.quantised.matmuls,
        "embeddings": chosen.quantised.embeddings,
        "left_alone": list(chosen.quantised.left_alone),
    }
    untimed = None if spec.target == "cpu" else UNTIMED
    mapped = MAPPED if exact.mapped and untimed is None else None
    own, cost = code_not_run(checkpoint), cost_of_experts(checkpoint.model, operators)
    with one_pipeline():
        answered = tuple(zip(evaluator.samples, evaluator.expected, strict=True))
        doubts = encoder_task(checkpoint.task).doubts(checkpoint, answered)
    warnings = (own, doubts, exported.warning, cost, _batching_remark(evaluator), untimed, mapped)
    removed = {"empty": exact.fused.empty, "pruned": chosen.pruned}
    return BuildReport(
        **built_from(spec, checkpoint),
        attention={"fused": exported.attentions, "layers": exported.layers},
        operators={name: operators[name] for name in FUSED if operators[name]},
        quantised=parts if chosen.quantised.matmuls else None,
        removed={name: asdict(units) for name, units in removed.items() if units is not None},
        variants=chosen.variants,
        memory=memory,
        metric=checkpoint.task.metric,
        gate=evaluator.metric,
        budget=None if evaluator.allowance is None else {"allowed": str(spec.budget), **evaluator.allowance.data},
        threshold=chosen.threshold,
        samples=len(evaluator.samples),
        padding=chosen.quality.padding,
        warnings=tuple(filter(None, warnings)),
        choice=selection.choice,
        chosen=selection.chosen.measured.name,
        engine=chosen.graph.engine,
        tuned_for=tuple(flag for flag in selection.chosen.option.fast_with if flag in cpu()["flags"]),
        files=file_hashes(entries),
        graph_files=dict(given),
    )


def _batching_remark(evaluator: Evaluator) -> str | None:
    """Describe which texts may share an engine call, if answers depend on the rest of a batch; else None."""
    constraint = evaluator.serving.batching.alike
    if constraint is None:
        return None
    common = "of the same number of tokens"
    if constraint != "length":
        common = f"in which the token {constraint} is equally frequent"
    return f"only texts {common} share an engine call: this model's answers depend on the rest of a batch otherwise"
