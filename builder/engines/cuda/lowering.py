"""A decoder's graph in half precision, its cache too, as ONNX Runtime's CUDA kernels take it.

Knows graphs and what a release has kernels for; knows nothing about models.
"""

from __future__ import annotations

from pathlib import Path

from builder.common.errors import SpecError
from builder.engines.cuda import without_kernel
from builder.engines.optimise.half_precision import to_half
from builder.graphs.onnx.graph import MODEL_FILE, Graph, load_whole, operator_needs, save_graph
from builder.graphs.onnx.rounding import rounded


def decoder_for_cuda(fused: Graph, precision: str, triton: str, folder: Path) -> tuple[Graph, Graph]:
    """Return the graph in `precision`, and the one in fp32 and rounded to it that it is judged by on a CPU.

    Raises SpecError for operators that CUDA lacks.
    """
    if "GroupQueryAttention with attention_bias" in operator_needs(fused):
        raise SpecError(
            "its attention adds a bias to scores (ALiBi), which ONNX Runtime's CUDA kernel does not have; build it for "
            "the CPU, or with --engine vllm"
        )
    in_float = without_kernel(fused.operators, precision, triton)
    half = to_half(fused, folder / precision / MODEL_FILE, precision, in_float, real=("logits",))
    return half, save_graph(rounded(load_whole(half.path)), folder / "judged" / MODEL_FILE)
