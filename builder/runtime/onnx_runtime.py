"""Import ONNX Runtime with its telemetry off: the library reads the variable when it is loaded."""

import os

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

import onnxruntime as onnxruntime
