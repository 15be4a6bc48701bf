"""Static embeddings: a table of tokens' vectors in place of a graph, from the checkpoint on.

The stages are those of encoders, whose front serves the table; nothing is exported, fused or calibrated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from builder.building.families import Fp32Judging, given_options
from builder.building.families.encoder import Encoder
from builder.building.families.encoder.results import ExportedEncoder, FusedEncoder
from builder.building.variants.budget import labelled_judge
from builder.building.variants.encoder import Maker
from builder.building.variants.evaluator import Evaluator
from builder.building.verify.parity import long_references
from builder.checkpoints.checkpoint import Checkpoint
from builder.checkpoints.static_embedding import StaticModel
from builder.checkpoints.tasks.feature_extraction import FeatureExtraction
from builder.common.errors import CheckpointError, SpecError
from builder.common.memory import weights_bytes
from builder.common.progress import Stage
from builder.common.workplace import require_disk_space
from builder.engines.encoding import Variant, encoding_engine
from builder.engines.numpy import BACKEND, write_table
from builder.engines.optimise import Quantised
from builder.graphs.export.encoder import Export, task_graph
from builder.graphs.export.rows import rows_of
from builder.graphs.onnx.graph import Graph, remove_graph
from builder.options import BuildSpec
from builder.runtime.encoder.table import TableSettings

TASKS = ("sentence-similarity", "feature-extraction")
OF_GRAPHS = (
    "--target", "--engine", "--executor", "--prune", "--graph", "--level", "--asymmetric", "--block-size",
    "--late-chunking", "--beams", "--max-answer", "--cache-gb", "--draft", "--adapters",
    "serving.optimization_level", "serving.tool_parser", "serving.batch_dimension",
    "serving.dynamo",
)  # fmt: skip


def begin(spec: BuildSpec, checkpoint: Checkpoint, folder: Path, stage: Stage) -> StaticEmbedder:
    """Return the stages of a table.

    Raises SpecError for an option that tables do not have, CheckpointError for a task that they cannot serve.
    """
    given = given_options(spec, *OF_GRAPHS)
    if given:
        raise SpecError(f"{given[0]} is for models with a graph; {checkpoint.source} is a table of vectors")
    if checkpoint.task.name not in TASKS:
        raise CheckpointError(
            f"{checkpoint.source} is a table of vectors, which serves {' and '.join(TASKS)}, not {checkpoint.task.name}"
        )
    if checkpoint.pooling not in (None, "mean"):
        raise SpecError(f"--pooling {checkpoint.pooling}: a table has the mean alone; leave --pooling out")
    known = {variant.precision: variant for variant in encoding_engine(BACKEND).variants}
    if spec.precision not in known:
        raise SpecError(f"a table of vectors has no --precision {spec.precision}; it has {', '.join(known)}")
    return StaticEmbedder(spec, checkpoint, folder, (known[spec.precision],), labelled_judge(spec, checkpoint))


@dataclass(frozen=True)
class StaticEmbedder(Encoder):
    """Stages of a table; `variants`: its one precision."""

    def export(self) -> ExportedEncoder:
        """Write the table in fp32. Raises RepositoryError if the disk is too full for it."""
        module = task_graph(self.checkpoint)
        require_disk_space(weights_bytes(self.checkpoint.model), "the table in fp32")
        long = long_references(module, rows_of(self.checkpoint), self.checkpoint.max_length)
        return ExportedEncoder(Export(_write(self.checkpoint, self.folder / "fp32", "fp32"), module, 0, 0, None), long)

    def fuse(self, exported: ExportedEncoder) -> FusedEncoder:
        """Return the table: it has nothing to fuse."""
        return FusedEncoder(exported, exported.export.graph, exported.export.graph, None)

    def _maker(self, graph: Graph, evaluator: Evaluator, as_verified: Graph | None) -> Maker:
        return TableMaker(self.spec, self.checkpoint, graph, self.folder)

    @property
    def _fp32(self) -> Fp32Judging:
        """Judge the table as it is served: mapped from its file in any case."""
        return Fp32Judging(is_served=False, chooses_by_time=False, leaves_in_file=lambda graph, is_served: False)


@dataclass(frozen=True)
class TableMaker:
    """Maker of a table in each precision; `exact`: in fp32."""

    spec: BuildSpec
    checkpoint: Checkpoint
    exact: Graph
    folder: Path

    def sensitive(self, variant: Variant) -> Mapping[str, float]:
        return {}

    def make(self, variant: Variant, left_alone: Sequence[str] = ()) -> Quantised:
        if variant.precision == "fp32":
            return Quantised(self.exact)
        graph = _write(self.checkpoint, self.folder / variant.precision, variant.precision)
        return Quantised(graph, embeddings=int(variant.precision == "int8"))

    def discard(self, variant: Variant, quantised: Quantised) -> None:
        if quantised.graph.path != self.exact.path:
            remove_graph(quantised.graph)


def _write(checkpoint: Checkpoint, folder: Path, precision: str) -> Graph:
    """Write the table of `checkpoint` into `folder`."""
    model, task = checkpoint.model, checkpoint.task
    assert isinstance(model, StaticModel)
    assert isinstance(task, FeatureExtraction)  # `begin` refuses others
    rows, pooler = model.table.weight.detach().numpy(), task.pooler(checkpoint)
    assert pooler is not None  # a table always has the mean
    settings = TableSettings(pooler.normalizes, min(pooler.dimensions or rows.shape[1], rows.shape[1]), pooler.skipped)
    return write_table(rows, settings, folder, precision)
