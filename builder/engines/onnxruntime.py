"""ONNX Runtime as an engine: its sessions, its fused operators, its name in Triton.

Knows files and threads; knows nothing about checkpoints or tasks.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime

BACKEND = "onnxruntime"
MODEL_FILE = "model.onnx"
ENCODER_FILE = "encoder.onnx"  # of an encoder-decoder model; its decoder is MODEL_FILE
FUSED_ATTENTION = ("MultiHeadAttention",)
FUSED_OPERATORS = (*FUSED_ATTENTION, "SkipLayerNormalization", "LayerNormalization", "BiasGelu", "FastGelu", "Gelu")
# Fusions that ONNX Runtime 1.31 runs slower than the operators they replace (MiniLM in int8: 1.36x with it left out,
# `scripts/bench fusions`). They are neither saved in a graph nor made at load here; 1.19 gains from this one, and
# makes it itself when it loads the graph.
SLOW_FUSIONS = ("SkipLayerNormFusion",)


def open_session(
    model: Path, threads: int, spinning: bool = False, optimised_file: Path | None = None
) -> onnxruntime.InferenceSession:
    """Open `model` on the CPU with `threads` intra-operator threads.

    With `optimised_file`, ONNX Runtime's hardware-independent fusions (its level "extended") are applied and
    the resulting graph is written there.
    """
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    options.add_session_config_entry("session.intra_op.allow_spinning", "1" if spinning else "0")
    if optimised_file is not None:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
        options.optimized_model_filepath = str(optimised_file)
        weights = f"{optimised_file.name}.data"
        options.add_session_config_entry("session.optimized_model_external_initializers_file_name", weights)
    return onnxruntime.InferenceSession(
        str(model), options, providers=["CPUExecutionProvider"], disabled_optimizers=list(SLOW_FUSIONS)
    )


def infer_with(
    session: onnxruntime.InferenceSession,
) -> Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]:
    """An `infer` callable as the emitted pipeline wants it: named arrays in, named arrays out."""
    names = [output.name for output in session.get_outputs()]
    return lambda feeds: dict(zip(names, session.run(names, feeds), strict=True))
