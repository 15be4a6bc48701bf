"""Comparison and report of an encoder whose variant is selected."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from builder.building.families import UNTIMED, built_from, code_not_run
from builder.building.families.as_served import MAPPED
from builder.building.families.encoder.outputs import SelectedEncoder
from builder.building.variants.encoder import ROUNDING
from builder.building.variants.evaluator import Evaluator
from builder.building.verify.parity import TOLERANCE
from builder.building.verify.quality import SERVED_TOLERANCE
from builder.checkpoints.checkpoint import Checkpoint
from builder.common.cpu import cpu
from builder.engines.optimise import Quantised
from builder.graphs.export.experts import cost_of_experts
from builder.graphs.onnx.operators import FUSED
from builder.options import BuildSpec
from builder.repository.config.entries import RepositoryEntry
from builder.repository.report.record import BuildReport, file_hashes
from builder.repository.verdict import Comparison, ParityBound


def comparison_of(chosen: SelectedEncoder) -> Comparison:
    """Compare the fused graph number by number and as it is served; then the variant by its quality."""
    exact = chosen.exact
    quality = exact.evaluator.relative_quality(chosen.selection.chosen.measured)
    return Comparison(
        (
            ParityBound("the error of the fused graph", exact.error, at_most=TOLERANCE),
            ParityBound("the error of the answers in fp32", exact.quality.error, at_most=SERVED_TOLERANCE),
            ParityBound(f"the {exact.evaluator.metric}", quality, at_least=chosen.threshold - ROUNDING),
        )
    )


def report_of(
    spec: BuildSpec, checkpoint: Checkpoint, chosen: SelectedEncoder, entries: Sequence[RepositoryEntry]
) -> BuildReport:
    """Return the report of everything that was decided and measured."""
    exact, selection = chosen.exact, chosen.selection
    exported, evaluator, operators = exact.fused.exported.export, exact.evaluator, chosen.graph.operators
    untimed = None if spec.target == "cpu" else UNTIMED
    mapped = MAPPED if exact.mapped and untimed is None else None
    own, cost = code_not_run(checkpoint), cost_of_experts(checkpoint.model)
    warnings = (own, exported.warning, cost, _batching_remark(evaluator), untimed, mapped)
    removed = {"empty": exact.fused.empty, "pruned": chosen.pruned}
    return BuildReport(
        **built_from(spec, checkpoint),
        attention={"fused": exported.attentions, "layers": exported.layers},
        operators={name: operators[name] for name in FUSED if operators[name]},
        quantised=_quantised(chosen.quantised),
        removed={name: asdict(units) for name, units in removed.items() if units is not None},
        variants=chosen.variants,
        metric=checkpoint.task.metric,
        gate=evaluator.metric,
        threshold=chosen.threshold,
        samples=len(evaluator.samples),
        padding=chosen.quality.padding,
        warnings=tuple(filter(None, warnings)),
        choice=selection.choice,
        chosen=selection.chosen.measured.name,
        engine=chosen.graph.engine,
        tuned_for=tuple(flag for flag in selection.chosen.option.fast_with if flag in cpu()["flags"]),
        files=file_hashes(entries),
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


def _quantised(quantised: Quantised) -> dict[str, object] | None:
    if not quantised.matmuls:
        return None
    return {
        "matmuls": quantised.matmuls,
        "embeddings": quantised.embeddings,
        "left_alone": list(quantised.left_alone),
    }
