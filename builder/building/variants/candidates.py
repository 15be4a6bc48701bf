"""Variants of an exported encoder: a precision on an engine.

Decides what `--precision` and `--engine` mean and what `auto` tries, of all that the engines offer; the packages of the
engines build their own form of a graph (builder/engines/encoding.py).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from builder.building.own_graph import own_graph
from builder.common.errors import SpecError
from builder.common.releases import runtime_has
from builder.engines import missing
from builder.engines.encoding import Variant, all_variants, encoding_engine
from builder.engines.optimise import Quantised
from builder.engines.optimise.activations import Feeds
from builder.engines.optimise.experts import quantise_experts
from builder.engines.optimise.fusion import fuse
from builder.engines.optimise.half_precision import HALVES, to_half
from builder.engines.optimise.quantisation import candidates, quantise, sensitivity
from builder.engines.optimise.weights import BITS, quantise_weights
from builder.engines.plain_attention import spell_out_attention
from builder.graphs.onnx.experts import run_all_experts
from builder.graphs.onnx.graph import MODEL_FILE, Graph, check_release, remove_graph
from builder.graphs.onnx.operators import EXPERTS, QUANTISED_EXPERTS_NEED
from builder.options import BuildSpec, WeightOptions

STATIC = ("int8-static", "fp8")
SENSITIVE = ("int8", *STATIC)  # precisions that can leave layers alone
GIVEN = "as given"
EIGHT_BIT_BLOCK = 128  # 768 x 3072 weights and 48 rows take 0.62 ms, and 0.81 ms in blocks of 32 (2 cores with AMX)


def requested_variants(spec: BuildSpec, flags: Collection[str]) -> tuple[Variant, ...]:
    """Return the variants that `spec` allows on a CPU with the instruction sets `flags`. Raises SpecError for none."""
    here = [v for v in all_variants() if v.target == "cpu"]
    if spec.graph is not None:
        engines = list(dict.fromkeys(v.engine for v in here if missing(v.engine) is None))
        chosen = engines if spec.engine == "auto" else [spec.engine or engines[0]]
        return tuple(Variant(GIVEN, engine) for engine in chosen)
    precision = "fp16" if spec.level == "O4" else spec.precision
    if spec.target != "cpu":
        return (_on_gpu(spec, precision),)
    tried = [v for v in here if precision in (v.precision, "auto") and spec.engine in (None, "auto", v.engine)]
    matching = [v for v in tried if precision != "auto" or v.precision in encoding_engine(v.engine).auto]
    if not matching:
        those = " and ".join(v.engine for v in here if v.precision == precision)
        if not those:
            raise SpecError(f"no engine has {precision} on a CPU; --target tensorrt has")
        raise SpecError(f"{spec.engine} has no {precision} on a CPU; {those} has: leave --engine out")
    reasons = {v: missing(v.engine) or encoding_engine(v.engine).unable(v.precision, flags) for v in matching}
    able = [v for v in matching if reasons[v] is None]
    if not able:
        raise SpecError(reasons[matching[0]])
    return tuple(able if spec.engine == "auto" or precision == "auto" else able[:1])


def _on_gpu(spec: BuildSpec, precision: str) -> Variant:
    """Return the variant for a GPU, whatever this machine has. Raises SpecError."""
    target = spec.target
    here = [v for v in all_variants() if v.target == target]
    engines = list(dict.fromkeys(v.engine for v in here))
    engine = spec.engine or (target if target in engines else engines[0])
    encoding_engine(engine).refuse_on_gpu(spec, precision)
    of_engine = [v for v in here if v.engine == engine]
    for variant in of_engine:
        if variant.precision == precision:
            return variant
    known = ", ".join(v.precision for v in of_engine)
    if precision == "auto":
        raise SpecError(f"--precision auto measures, and this machine does not run --target {target}: say {known}")
    raise SpecError(f"{engine} has no {precision} for --target {target}; it has {known}")


@dataclass(frozen=True)
class VariantMaker:
    """Maker of the variants of one exported graph. `feeds`: the engine's inputs, to calibrate on.

    `verified`: the graph fused at the spec's level, where it was fused to be verified.
    """

    spec: BuildSpec
    exported: Graph
    folder: Path
    feeds: Sequence[Feeds]
    verified: Graph | None = None

    @cached_property
    def fused(self) -> Graph:
        """Graph fused for ONNX Runtime."""
        graph = self.verified or fuse(self.exported, self.folder, self.spec.level)
        check_release(graph, self.spec.triton, self.spec.in_process)
        return graph

    @cached_property
    def plain(self) -> Graph:
        """Graph for engines that fuse attention themselves; those of a Triton release run every expert."""
        graph = self.exported if self.spec.in_process else run_all_experts(self.exported, self.folder)
        return spell_out_attention(graph, self.folder)

    @cached_property
    def eight_bit_plain(self) -> Graph:
        """Graph for engines that fuse attention themselves, its experts in 8 bits."""
        if not self.exported.operators[EXPERTS]:
            return self.plain
        folder = self.folder / "eight-bit"
        return spell_out_attention(self._with_eight_bit_experts(self.exported, self.spec.in_process, folder), folder)

    @cached_property
    def eight_bit_fused(self) -> Graph:
        """Graph fused for ONNX Runtime, its experts in 8 bits."""
        return self._with_eight_bit_experts(self.fused, self._has_quantised_experts, self.folder)

    def _with_eight_bit_experts(self, graph: Graph, has_operator: bool, folder: Path) -> Graph:
        """Return `graph` with its experts in 8 bits: by an operator of their own, or as products that are to be."""
        if not graph.operators[EXPERTS]:
            return graph
        options = replace(self.spec.weight_options, block_size=EIGHT_BIT_BLOCK)
        quantised = quantise_experts(graph, options, folder) if has_operator else None
        return quantised or run_all_experts(graph, folder)

    @property
    def _has_quantised_experts(self) -> bool:
        return runtime_has(QUANTISED_EXPERTS_NEED, self.spec.triton, self.spec.in_process)

    @cached_property
    def _sources(self) -> dict[tuple[str, str, bool], Graph]:
        """Graphs that engines read, where they were built already: by engine, target, and True for 8-bit variants."""
        return {}

    @cached_property
    def own_graph(self) -> Graph:
        """The user's own graph. Raises SpecError if it is not one of this checkpoint's task."""
        assert self.spec.graph is not None
        graph = own_graph(self.spec.graph, self.exported, self.folder / "given" / MODEL_FILE)
        check_release(graph, self.spec.triton, self.spec.in_process)
        return graph

    def sensitive(self, variant: Variant) -> Mapping[str, float]:
        """Return the error of each layer of `variant` that can be left alone, the largest first."""
        source = self._source(variant)
        return sensitivity(source, candidates(source), self.feeds) if variant.precision in SENSITIVE else {}

    def make(self, variant: Variant, left_alone: Sequence[str] = ()) -> Quantised:
        """Build the graph of `variant`. Raises VerificationError if that fails."""
        source, spec, engine = self._source(variant), self.spec, encoding_engine(variant.engine)
        path = self.folder / f"{variant.precision}-{variant.engine}-{len(left_alone)}" / MODEL_FILE
        quantised = Quantised(source)
        if variant.precision == "int8":
            quantised = quantise(source, path, left_alone)
        elif variant.precision in STATIC:
            quantised = self._static(variant, source, path, left_alone)
        elif variant.precision in BITS:
            source = source if self._has_quantised_experts else run_all_experts(source, self.folder)
            options, products_of = self._weight_options(variant), variant.engine
            quantised = quantise_weights(source, variant.precision, options, path.parent, products_of=products_of)
            if engine.reads_fused(variant.target):  # ONNX Runtime opens this file
                check_release(quantised.graph, spec.triton, spec.in_process)
        elif variant.precision in HALVES and not engine.converts_to_half:
            in_float = engine.without_half(source.operators, variant.precision, variant.target, spec.triton)
            half = to_half(source, path, variant.precision, in_float)
            on_gpu = variant.target != "cpu" and variant.precision == "fp16"
            quantised = Quantised(replace(half, arithmetic="fp16") if on_gpu else half)
        return engine.finish(quantised, variant.precision, path)

    def _weight_options(self, variant: Variant) -> WeightOptions:
        options = self.spec.weight_options
        if self.spec.block_size is None and variant.precision == "int8-weights":
            return replace(options, block_size=EIGHT_BIT_BLOCK)
        return options

    def discard(self, variant: Variant, quantised: Quantised) -> None:
        """Remove the files of `variant`, except those of its source."""
        if quantised.graph.path != self._source(variant).path:
            remove_graph(quantised.graph)

    def _static(self, variant: Variant, source: Graph, path: Path, left_alone: Sequence[str]) -> Quantised:
        """Quantise `source` statically into `path`.

        TensorRT takes activations around zero only and has no 8-bit tables.
        """
        from builder.engines.optimise.static_quantisation import quantise_statically  # loads onnxruntime.quantization

        calibration = self.spec.calibration
        if variant.target == "cpu":
            return quantise_statically(source, path, calibration, self.feeds, left_alone)
        calibration = calibration.model_copy(update={"symmetric": True})
        real = path.parent / "real" / path.name
        quantised = quantise_statically(
            source, real, calibration, self.feeds, left_alone, False, variant.precision == "fp8"
        )
        if not encoding_engine(variant.engine).runs_rest_in_half:
            return quantised
        return replace(quantised, graph=to_half(quantised.graph, path))

    def _source(self, variant: Variant) -> Graph:
        if variant.precision == GIVEN:
            return self.own_graph
        eight_bit = variant.precision in SENSITIVE
        key = (variant.engine, variant.target, eight_bit)
        if key not in self._sources:
            engine = encoding_engine(variant.engine)
            if engine.reads_fused(variant.target):
                graph = self.eight_bit_fused if eight_bit else self.fused
            else:
                graph = self.eight_bit_plain if eight_bit else self.plain
            self._sources[key] = engine.source(graph, variant.target, self.folder)
        return self._sources[key]
