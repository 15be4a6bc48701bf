"""Graphs in whichever ONNX Runtime is found first; builder/building/verify/replay.py runs this file alone."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

onnxruntime.set_default_logger_severity(4)
TYPES = {"tensor(float)": np.float32, "tensor(int64)": np.int64}


def open_graph(case: "dict[str, Any]") -> "Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]":
    """Open it as Triton's backend does: all optimisations, as many threads as an instance has."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = case["threads"]
    session = onnxruntime.InferenceSession(case["model"], options, providers=["CPUExecutionProvider"])
    names, inputs = case["outputs"], session.get_inputs()

    def infer(feeds: "dict[str, np.ndarray]") -> "dict[str, np.ndarray]":
        rows = len(next(iter(feeds.values())))
        without = [value for value in inputs if value.name.startswith("lora_") and value.name not in feeds]
        zeros = {
            value.name: np.zeros([size if isinstance(size, int) else rows for size in value.shape], TYPES[value.type])
            for value in without
        }
        return dict(zip(names, session.run(names, {**feeds, **zeros}), strict=True))

    return infer


def open_executor(case: "dict[str, Any]") -> Any:
    """Open the emitted executor: one whose steps are calls of the graph, or one in process that may attend to texts."""
    from runtime.contract import Session  # type: ignore[import-not-found]
    from runtime.generation.executors.base import Geometry  # type: ignore[import-not-found]
    from runtime.generation.executors.bls import Bls  # type: ignore[import-not-found]
    from runtime.generation.executors.encoding import CrossGeometry  # type: ignore[import-not-found]
    from runtime.generation.executors.onnxruntime import InProcess  # type: ignore[import-not-found]
    from runtime.generation.executors.onnxruntime_hidden_states import HiddenStatesDraft  # type: ignore[import-not-found]
    from runtime.generation.executors.onnxruntime_seq2seq import CrossAttending  # type: ignore[import-not-found]
    from runtime.sessions import open_session  # type: ignore[import-not-found]

    geometry, paths, options = Geometry(**case["geometry"]), map(Path, case["models"]), Session(**case["session"])
    if case["remote"]:
        return _remote(Bls, case["models"][0], geometry)
    if case["draft"]:
        return HiddenStatesDraft(geometry, open_session(*paths, options))
    if case["cross"] is None:
        return InProcess(*paths, geometry, options)
    return CrossAttending(*paths, geometry, CrossGeometry(**case["cross"]), options)


def _remote(executor: Any, model: str, geometry: Any) -> Any:
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]

    def infer(feeds: "dict[str, np.ndarray]") -> "dict[str, np.ndarray]":
        return dict(zip(names, session.run(names, feeds), strict=True))

    return executor(infer, [value.name for value in session.get_inputs()], geometry)
