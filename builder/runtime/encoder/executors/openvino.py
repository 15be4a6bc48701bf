"""Run OpenVINO in the front's own process."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from ...contract import ContractError, EncoderServing, OpenVinoSession
from ...cores import cores
from ...open_vino import openvino

PRECISIONS = {"fp32": "f32", "bf16": "bf16"}


class Executor:
    """Runs the model beside serving.json in the floating-point precision in which it was verified."""

    map_calls = map

    def __init__(self, folder: Path, serving: EncoderServing) -> None:
        session = serving.session
        if serving.model is None or not isinstance(session, OpenVinoSession):
            raise ContractError("serving.json names no model for OpenVINO in process. Build the model again")
        precision = PRECISIONS[session.precision]
        settings = {
            "INFERENCE_NUM_THREADS": session.threads or cores(),
            "NUM_STREAMS": 1,
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_PRECISION_HINT": precision,
        }
        core = openvino.Core()
        compiled = core.compile_model(core.read_model(str(folder / serving.model)), "CPU", settings)
        multiplied = compiled.get_property("INFERENCE_PRECISION_HINT").to_string()
        if precision == "bf16" and "BF16" not in core.get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
            multiplied = "f32"  # the property repeats the hint even if the CPU lacks bf16 (OpenVINO 2026.4)
        if multiplied != precision:
            raise RuntimeError(
                f"OpenVINO multiplies in {multiplied} on this CPU and the model was verified in {precision}: build it "
                "on a CPU like this one, or with --engine onnxruntime"
            )
        self.request = compiled.create_infer_request()
        self.outputs = list(serving.outputs)

    def infer(self, feeds: dict[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        self.request.infer(feeds, share_inputs=True, share_outputs=True)  # copied below, once
        return {name: self.request.get_tensor(name).data.copy() for name in self.outputs}  # the next call overwrites it
