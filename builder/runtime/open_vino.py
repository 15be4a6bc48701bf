"""Import OpenVINO with its telemetry off: the import itself reports to Google Analytics, and no variable prevents it.

If openvino-telemetry cannot be imported, OpenVINO uses a stub instead (openvino/tools/ovc/telemetry_utils.py).
"""

import sys

sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]  # makes its import fail

import openvino as openvino  # noqa: E402
from openvino._offline_transformations import (  # noqa: E402
    paged_attention_transformation as paged_attention_transformation,
)
from openvino.frontend.onnx import ConversionExtension as ConversionExtension  # noqa: E402
