"""Models in whichever OpenVINO is found first; builder/building/verify/replay.py runs this file alone."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]  # as in builder/runtime/open_vino.py

import numpy as np  # noqa: E402
import openvino  # noqa: E402


def open_graph(case: "dict[str, Any]") -> "Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]":
    """Open it as Triton's backend does, which has an option for bf16 and for no other arithmetic."""
    core = openvino.Core()
    settings = {"INFERENCE_NUM_THREADS": case["threads"]}
    if case["arithmetic"] == "bf16":
        settings["INFERENCE_PRECISION_HINT"] = "bf16"
    request = core.compile_model(core.read_model(case["model"]), "CPU", settings).create_infer_request()

    def infer(feeds: "dict[str, np.ndarray]") -> "dict[str, np.ndarray]":
        request.infer(feeds)
        return {name: request.get_tensor(name).data.copy() for name in case["outputs"]}

    return infer


def open_executor(case: "dict[str, Any]") -> Any:
    """Open the emitted executor, over blocks that all sequences share."""
    from runtime.contract import Session  # type: ignore[import-not-found]
    from runtime.generation.executors.base import Geometry  # type: ignore[import-not-found]
    from runtime.generation.executors.openvino import OpenVinoExecutor  # type: ignore[import-not-found]
    from runtime.generation.executors.openvino_hidden_states import HiddenStatesDraft  # type: ignore[import-not-found]

    executor = HiddenStatesDraft if case["draft"] else OpenVinoExecutor
    return executor(Path(case["models"][0]), Geometry(**case["geometry"]), Session(**case["session"]))
