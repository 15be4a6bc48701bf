"""Open a graph in this process, on the ONNX Runtime that it was written for."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from .contract import Session
from .cores import cores

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # read when the library is loaded

import onnxruntime as onnxruntime


def version_mismatch(metadata: "Mapping[str, str]", version: str) -> "str | None":
    """Return why ONNX Runtime `version` would misread a graph with `metadata`; None if it would not.

    ONNX Runtime 1.24 changed what a window's size counts (microsoft/onnxruntime, pull request 25927): the metadata of a
    graph with windows name the first version that reads it correctly, or the first that no longer does.
    """

    def number(text: str) -> "tuple[int, ...]":
        return tuple(int(part) for part in text.split(".")[:3] if part.isdigit())

    least, end = metadata.get("onnxruntime_from", "0"), metadata.get("onnxruntime_below")
    if number(version) >= number(least) and (end is None or number(version) < number(end)):
        return None
    expected = f"{least} or later" if end is None else f"a version below {end}"
    return f"its attention windows were written for ONNX Runtime {expected}, and {version} reads them otherwise"


def refuse_version_mismatch(session: onnxruntime.InferenceSession) -> None:
    """Raise RuntimeError if this ONNX Runtime reads the graph of `session` differently than when it was verified."""
    problem = version_mismatch(session.get_modelmeta().custom_metadata_map, onnxruntime.__version__)
    if problem is not None:
        raise RuntimeError(
            f"{problem}: install what build-repo's requirements.txt pins for the Python of this Triton release, or "
            "build the model with --triton for the release that is to serve it"
        )


def open_session(model: Path, session: Session) -> onnxruntime.InferenceSession:
    """Open `model` on the CPU."""
    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = 3
    settings.intra_op_num_threads = session.threads or cores()
    settings.inter_op_num_threads = 1
    for key, value in session.entries.items():
        settings.add_session_config_entry(key, value)
    opened = onnxruntime.InferenceSession(
        str(model), settings, providers=["CPUExecutionProvider"], disabled_optimizers=["SkipLayerNormFusion"]
    )
    refuse_version_mismatch(opened)
    return opened
