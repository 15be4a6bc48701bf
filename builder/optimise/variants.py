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

from builder.engines import onnxruntime, openvino
from builder.errors import SpecError
from builder.export.graph import Graph, check_release, read_graph, save_graph
from builder.export.plain import spell_out_attention
from builder.optimise.activations import Feeds
from builder.optimise.decoder_weights import BITS, WeightOptions, quantise_weights
from builder.optimise.fusion import fuse
from builder.optimise.half_precision import to_half
from builder.optimise.quantisation import Quantised, candidates, quantise, sensitivity
from builder.optimise.static_quantisation import quantise_statically
from builder.spec import BuildSpec

BF16 = ("avx512_bf16", "amx_bf16")
VNNI = ("avx512_vnni", "avx_vnni", "amx_int8")
SENSITIVE = ("int8", "int8-static")  # precisions that can leave layers alone


@dataclass(frozen=True)
class Variant:
    """A precision on an engine. `fast_with`: instruction sets of which it wants one."""

    precision: str
    engine: str
    fast_with: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.precision if self.engine == onnxruntime.BACKEND else f"{self.precision} OpenVINO"


VARIANTS = (
    Variant("fp32", "onnxruntime"),
    Variant("fp32", "openvino"),
    Variant("bf16", "openvino", BF16),  # ONNX Runtime has no bf16 on a CPU
    Variant("fp16", "onnxruntime"),
    Variant("fp16", "openvino"),
    Variant("int8", "onnxruntime", VNNI),  # OpenVINO reads dynamic int8 wrongly
    Variant("int8-static", "onnxruntime", VNNI),
    Variant("int8-static", "openvino", VNNI),
    Variant("int8-weights", "onnxruntime", VNNI),
    Variant("int4-weights", "onnxruntime", VNNI),
)
GIVEN = "as given"
AUTO = ("fp32", "bf16", "int8", "int8-static")  # the others are slower on every CPU they were measured on


def asked(spec: BuildSpec, flags: Collection[str]) -> tuple[Variant, ...]:
    """The variants that `spec` allows on a CPU with the instruction sets `flags`. Raises SpecError for none."""
    if spec.graph is not None:
        both = ("onnxruntime", "openvino") if spec.engine == "auto" else (spec.engine or "onnxruntime",)
        return tuple(Variant(GIVEN, engine) for engine in both)
    precision = "fp16" if spec.level == "O4" else spec.precision
    wanted = AUTO if precision == "auto" else (precision,)
    found = [v for v in VARIANTS if v.precision in wanted and spec.engine in (None, "auto", v.engine)]
    if not found:
        engines = " and ".join(v.engine for v in VARIANTS if v.precision == precision)
        raise SpecError(f"{spec.engine} has no {precision} on a CPU; {engines} has: leave --engine out")
    able = [v for v in found if v.precision != "bf16" or set(BF16) & set(flags)]
    if not able:
        raise SpecError(
            f"this CPU multiplies no bf16: it has none of {', '.join(BF16)}. Use --precision int8-static or fp32, or "
            "build where it is to be served"
        )
    return tuple(able if spec.engine == "auto" or precision == "auto" else able[:1])


@dataclass(frozen=True)
class Workshop:
    """One exported graph and what is made of it. `feeds`: the engine's inputs, to calibrate on."""

    spec: BuildSpec
    exported: Graph
    folder: Path
    feeds: Sequence[Feeds]

    @cached_property
    def fused(self) -> Graph:
        """For ONNX Runtime."""
        graph = fuse(self.exported, self.folder, self.spec.level)
        check_release(graph, self.spec.triton)
        return graph

    @cached_property
    def plain(self) -> Graph:
        """For OpenVINO, which fuses it when it loads it."""
        return spell_out_attention(self.exported, self.folder)

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
        check_release(graph, self.spec.triton)
        return save_graph(onnx.load(str(path)), self.folder / "given" / onnxruntime.MODEL_FILE)

    def sensitive(self, variant: Variant) -> list[str]:
        """The layers of `variant` that can be left alone, those that lose most first."""
        source = self._source(variant)
        return sensitivity(source, candidates(source), self.feeds) if variant.precision in SENSITIVE else []

    def make(self, variant: Variant, left_alone: Sequence[str] = ()) -> Quantised:
        """The graph of `variant`. Raises VerificationError where nothing came of it."""
        source, spec = self._source(variant), self.spec
        path = self.folder / f"{variant.precision}-{variant.engine}-{len(left_alone)}" / onnxruntime.MODEL_FILE
        made = Quantised(source, 0, 0, ())
        if variant.precision == "int8":
            made = quantise(source, path, left_alone)
        elif variant.precision == "int8-static":
            made = quantise_statically(source, path, spec.calibration, self.feeds, left_alone)
        elif variant.precision in BITS:
            options = WeightOptions(spec.block_size, not spec.asymmetric)
            weights = quantise_weights(source, variant.precision, options, self.folder)
            made = Quantised(weights.graph, weights.matmuls, weights.embeddings, ())
        elif variant.precision == "fp16" and variant.engine == onnxruntime.BACKEND:
            made = Quantised(to_half(source, path), 0, 0, ())
        if variant.engine == onnxruntime.BACKEND:
            return made
        arithmetic = "bf16" if variant.precision == "bf16" else "fp32"
        half_weights = variant.precision != "fp32"
        graph = openvino.convert(made.graph, path.parent / "ir" / openvino.MODEL_FILE, arithmetic, half_weights)
        return replace(made, graph=graph)

    def _source(self, variant: Variant) -> Graph:
        if variant.precision == GIVEN:
            return self.given
        return self.fused if variant.engine == onnxruntime.BACKEND else self.plain
