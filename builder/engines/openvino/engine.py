"""OpenVINO as an engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from builder.common.memory import BYTES_PER_VALUE
from builder.common.releases import RELEASES
from builder.engines import GraphEngine, Infer, Shapes, openvino
from builder.engines.placement import on_cpu
from builder.runtime.contract import CacheType, LayerShape, OpenVinoSession, Session
from builder.runtime.generation.executors.openvino_graph import BLOCK

if TYPE_CHECKING:
    from builder.engines.placement import Placement
    from builder.engines.profiles import Calls
    from builder.engines.stock import Signature
    from builder.graphs.onnx.graph import Graph
    from builder.options import BuildSpec


class OpenVino(GraphEngine):
    rows_are_an_axis: ClassVar[bool] = True  # its backend refuses calls of fewer rows than max_batch_size: openvino.cc

    def infer(self, graph: Graph, threads: int, spinning: bool = False) -> Infer:
        """Open `graph`. OpenVINO's threads do not spin: `spinning` has no effect."""
        return openvino.infer(graph, threads)

    def place(self, options: BuildSpec, graph: Graph, calls: Calls) -> Placement:
        return on_cpu(options, openvino.parameters(graph, options.threads_per_instance, options.instances))

    def session(self, graph: Graph, threads: int, spinning: bool) -> OpenVinoSession:
        return OpenVinoSession("bf16" if graph.arithmetic == "bf16" else "fp32", threads)

    def served_version(self, triton: str, in_process: bool) -> str:
        release = RELEASES[triton]
        return release.openvino_in_process if in_process else release.openvino

    def buckets(self, max_rows: int, max_length: int, token_budget: int) -> Shapes:
        """Return the shapes that calls are padded to: OpenVINO makes its primitives anew for each shape.

        Both dimensions go up in steps of a quarter to an eighth: lengths 8, 16 .. 64, 80 .. 128, 160 and so on, rows 2,
        3, 4, 6, 8, 12 and so on. A row alone has finer steps, 4, 8 .. 128, 136 .. 256, 272 and so on.
        """
        lengths, rows = _steps(8, 8, max_length), _steps(1, 4, max_rows)[1:]
        alone = [(1, length) for length in _steps(4, 32, max_length)]
        together = [(count, length) for length in lengths for count in rows if count * length <= token_budget]
        return tuple(sorted(alone + together, key=lambda shape: (shape[0] * shape[1], shape)))

    def wrong_cpus(self, graph: Graph) -> tuple[str, ...]:
        """Return the CPUs with bf16 for a graph in fp32: Triton's backend has no option to multiply in fp32 there."""
        return openvino.BF16 if graph.arithmetic == "fp32" else ()

    def files(self, model: Path) -> tuple[Path, ...]:
        return (model, model.with_suffix(".bin")) if model.suffix == ".xml" else (model,)

    def signature(self, model: Path) -> Signature:
        return openvino.signature(model)

    def block_tokens(self, layers: Sequence[LayerShape]) -> int:
        return BLOCK

    def block_bytes(self, layers: Sequence[LayerShape], cache: CacheType) -> int:
        if cache != "uint8":
            return super().block_bytes(layers, cache)
        # A token's key and value have a scale and a zero each.
        return sum(2 * BLOCK * shape.heads * (shape.size + 8) for shape in layers)

    def state_bytes(self, layers: Sequence[LayerShape]) -> int:
        """Return the bytes of the states of one slot: a convolution keeps a token besides those before it."""
        convolutions = [shape for layer in layers for shape in layer.states if len(shape) == 2]
        return super().state_bytes(layers) + sum(channels for _, channels in convolutions) * BYTES_PER_VALUE["float32"]

    def refused_loop(self, model: Path) -> str | None:
        from builder.runtime.generation.executors.openvino import compile_paged  # loads OpenVINO

        try:
            compile_paged(model, Session(engine=self.name, entries=openvino.decoder_properties("float32")))
        except RuntimeError as error:
            return str(error).strip().splitlines()[-1]
        return None


def _steps(first: int, each: int, last: int) -> list[int]:
    """Return `first` to `last` in steps that double: `each` values of the first, half as many of each other."""
    steps, step = [first], first
    while steps[-1] < last:
        if steps[-1] == each * step:
            step *= 2
        steps.append(min(steps[-1] + step, last))
    return steps


ENGINE = OpenVino()
