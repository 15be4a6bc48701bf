"""What can be made of an exported encoder: a precision on an engine.

One list for every choice: what `--precision` and `--engine` mean, what `auto` tries, what a CPU must have.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError

from builder.engines import onnxruntime, openvino, tensorrt
from builder.engines.cpu import cpu
from builder.engines.cuda import without_kernel
from builder.engines.key_lengths import count_keys
from builder.engines.plain_attention import spell_out_attention
from builder.engines.tensorrt.lowering import for_tensorrt
from builder.errors import SpecError
from builder.onnx.graph import Graph, check_release, read_graph, save_graph
from builder.optimise.activations import Feeds
from builder.optimise.fusion import fuse
from builder.optimise.half_precision import HALVES, to_half
from builder.optimise.quantisation import candidates, quantise, sensitivity
from builder.optimise.quantised import Quantised
from builder.optimise.static_quantisation import quantise_statically
from builder.optimise.weights import BITS, quantise_weights
from builder.spec import BuildSpec
from builder.triton.releases import RELEASES, version_tuple, with_tensorrt

VNNI = ("avx512_vnni", "avx_vnni", "amx_int8")
STATIC = ("int8-static", "fp8")
SENSITIVE = ("int8", *STATIC)  # precisions that can leave layers alone


RUNG_NAMES = {  # engine and target, as a rung is called after them
    ("onnxruntime", "cpu"): "",
    ("openvino", "cpu"): "OpenVINO",
    ("onnxruntime", "cuda"): "CUDA",
    ("tensorrt", "tensorrt"): "TensorRT",
    ("onnxruntime", "tensorrt"): "TensorRT by ONNX Runtime",
}


@dataclass(frozen=True)
class Variant:
    """A precision on an engine, for a target. `fast_with`: instruction sets of which it wants one."""

    precision: str
    engine: str
    fast_with: tuple[str, ...] = ()
    target: str = "cpu"

    @property
    def name(self) -> str:
        return f"{self.precision} {RUNG_NAMES[self.engine, self.target]}".strip()


VARIANTS = (
    Variant("fp32", "onnxruntime"),
    Variant("fp32", "openvino"),
    Variant("bf16", "openvino", openvino.BF16),  # ONNX Runtime has no bf16 on a CPU
    Variant("fp16", "onnxruntime"),
    Variant("fp16", "openvino"),
    Variant("int8", "onnxruntime", VNNI),  # OpenVINO reads dynamic int8 wrongly
    Variant("int8-static", "onnxruntime", VNNI),
    Variant("int8-static", "openvino", VNNI),
    Variant("int8-weights", "onnxruntime", VNNI),
    Variant("int4-weights", "onnxruntime", VNNI),
    *(Variant(precision, "onnxruntime", target="cuda") for precision in ("fp32", "fp16", "bf16")),
    *(Variant(p, "tensorrt", target="tensorrt") for p in ("fp32", "fp16", "bf16", "int8-static", "fp8")),
    *(Variant(p, "onnxruntime", target="tensorrt") for p in ("fp32", "fp16", "int8-static")),
)
GIVEN = "as given"
AUTO = ("fp32", "bf16", "int8", "int8-static")  # the others are slower on every CPU they were measured on


def requested_variants(spec: BuildSpec, flags: Collection[str]) -> tuple[Variant, ...]:
    """The variants that `spec` allows on a CPU with the instruction sets `flags`. Raises SpecError for none."""
    if spec.graph is not None:
        both = ("onnxruntime", "openvino") if spec.engine == "auto" else (spec.engine or "onnxruntime",)
        return tuple(Variant(GIVEN, engine) for engine in both)
    precision = "fp16" if spec.level == "O4" else spec.precision
    if spec.target != "cpu":
        return (_on_gpu(spec.target, spec.engine, precision, spec.triton),)
    wanted = AUTO if precision == "auto" else (precision,)
    here = [v for v in VARIANTS if v.target == "cpu"]
    matching = [v for v in here if v.precision in wanted and spec.engine in (None, "auto", v.engine)]
    if not matching:
        engines = " and ".join(v.engine for v in here if v.precision == precision)
        if not engines:
            raise SpecError(f"no engine has {precision} on a CPU; --target tensorrt has")
        raise SpecError(f"{spec.engine} has no {precision} on a CPU; {engines} has: leave --engine out")
    other = {"fp32": "bf16", "bf16": "fp32"}[openvino.arithmetic_on(flags)]
    able = [v for v in matching if (v.engine, v.precision) != (openvino.BACKEND, other)]
    if not able and other == "bf16":
        raise SpecError(
            f"this CPU cannot multiply in bf16: it has none of {', '.join(openvino.BF16)}. Use --precision int8-static "
            "or fp32, or build on the machine that will serve"
        )
    if not able:
        raise SpecError(
            "on this CPU OpenVINO multiplies in bf16, and Triton's backend has no parameter for fp32: use --precision "
            "bf16, or --engine onnxruntime"
        )
    return tuple(able if spec.engine == "auto" or precision == "auto" else able[:1])


def _on_gpu(target: str, asked: str | None, precision: str, triton: str) -> Variant:
    """The variant for a GPU, whatever this machine has. Raises SpecError."""
    engine = asked or {"cuda": onnxruntime.BACKEND, "tensorrt": tensorrt.BACKEND}[target]
    has = RELEASES[triton].tensorrt
    if target == "tensorrt" and has is not None and version_tuple(has) < version_tuple(tensorrt.LEAST):
        raise SpecError(
            f"Triton {triton} has TensorRT {has}; graphs that state their precision in their types need "
            f"{tensorrt.LEAST}: use --triton {with_tensorrt(tensorrt.LEAST)[0]} or later"
        )
    of_engine = [v for v in VARIANTS if (v.target, v.engine) == (target, engine)]
    for variant in of_engine:
        if variant.precision == precision:
            return variant
    known = ", ".join(v.precision for v in of_engine)
    if precision == "auto":
        raise SpecError(f"--precision auto measures, and this machine does not run --target {target}: say {known}")
    raise SpecError(f"{engine} has no {precision} for --target {target}; it has {known}")


@dataclass(frozen=True)
class VariantMaker:
    """One exported graph and what is made of it. `feeds`: the engine's inputs, to calibrate on.

    `verified`: the graph fused at the spec's level, where it was fused to be verified.
    """

    spec: BuildSpec
    exported: Graph
    folder: Path
    feeds: Sequence[Feeds]
    verified: Graph | None = None

    @cached_property
    def fused(self) -> Graph:
        """For ONNX Runtime."""
        graph = self.verified or fuse(self.exported, self.folder, self.spec.level)
        check_release(graph, self.spec.triton, self.spec.in_process)
        return graph

    @cached_property
    def plain(self) -> Graph:
        """For OpenVINO and TensorRT, which fuse it themselves."""
        return spell_out_attention(self.exported, self.folder)

    @cached_property
    def for_tensorrt(self) -> Graph:
        """For TensorRT, as a plan or by ONNX Runtime."""
        return for_tensorrt(self.plain, self.folder)

    @cached_property
    def for_cuda(self) -> Graph:
        """For ONNX Runtime on a GPU."""
        return count_keys(self.fused, self.folder)

    @cached_property
    def given(self) -> Graph:
        """The user's own graph. Raises SpecError where it is not one of this checkpoint's task."""
        path = self.spec.graph
        assert path is not None
        try:
            graph = read_graph(path)
        except (OSError, DecodeError) as error:
            raise SpecError(f"--graph {path} cannot be read as ONNX: {error}") from error
        wrong = [name for name in graph.inputs if name not in self.exported.inputs]
        if wrong or graph.outputs != self.exported.outputs:
            raise SpecError(
                f"--graph {path} takes {', '.join(graph.inputs)} and gives {', '.join(graph.outputs)}; the task takes "
                f"{', '.join(self.exported.inputs)} and gives {', '.join(self.exported.outputs)}: name them so"
            )
        check_release(graph, self.spec.triton, self.spec.in_process)
        return save_graph(onnx.load(str(path)), self.folder / "given" / onnxruntime.MODEL_FILE)

    def sensitive(self, variant: Variant) -> list[str]:
        """The layers of `variant` that can be left alone, those that lose most first."""
        source = self._source(variant)
        return sensitivity(source, candidates(source), self.feeds) if variant.precision in SENSITIVE else []

    def make(self, variant: Variant, left_alone: Sequence[str] = ()) -> Quantised:
        """The graph of `variant`. Raises VerificationError where nothing came of it."""
        source, spec = self._source(variant), self.spec
        path = self.folder / f"{variant.precision}-{variant.engine}-{len(left_alone)}" / onnxruntime.MODEL_FILE
        on_openvino = variant.engine == openvino.BACKEND
        quantised = Quantised(source)
        if variant.precision == "int8":
            quantised = quantise(source, path, left_alone)
        elif variant.precision in STATIC:
            quantised = self._static(variant, source, path, left_alone)
        elif variant.precision in BITS:
            quantised = quantise_weights(source, variant.precision, spec.weight_options, self.folder)
            check_release(quantised.graph, spec.triton, spec.in_process)
        elif variant.precision in HALVES and not on_openvino:
            kept: Sequence[str] = ()
            if variant.target == "cuda":
                kept = without_kernel(source.operators, variant.precision, spec.triton)
            quantised = Quantised(to_half(source, path, variant.precision, kept))
        if on_openvino:
            exact_or_rounded = variant.precision in ("fp32", "bf16")
            arithmetic = variant.precision if exact_or_rounded else openvino.arithmetic_on(cpu()["flags"])
            half_weights = variant.precision != "fp32"
            graph = openvino.convert(
                quantised.graph, path.parent / "ir" / openvino.MODEL_FILE, arithmetic, half_weights
            )
            return replace(quantised, graph=graph)
        return replace(quantised, graph=replace(quantised.graph, engine=variant.engine))

    def _static(self, variant: Variant, source: Graph, path: Path, left_alone: Sequence[str]) -> Quantised:
        """TensorRT takes activations around zero only and has no 8-bit tables; a plan runs what stays real in fp16."""
        calibration = self.spec.calibration
        if variant.target == "cpu":
            return quantise_statically(source, path, calibration, self.feeds, left_alone)
        calibration = calibration.model_copy(update={"symmetric": True})
        real = path.parent / "real" / path.name
        quantised = quantise_statically(
            source, real, calibration, self.feeds, left_alone, False, variant.precision == "fp8"
        )
        if variant.engine == onnxruntime.BACKEND:  # its TensorRT allows one lower precision, which is int8
            return quantised
        return replace(quantised, graph=to_half(quantised.graph, path))

    def _source(self, variant: Variant) -> Graph:
        if variant.precision == GIVEN:
            return self.given
        if variant.target == "cpu":
            return self.fused if variant.engine == onnxruntime.BACKEND else self.plain
        return self.for_cuda if variant.target == "cuda" else self.for_tensorrt
