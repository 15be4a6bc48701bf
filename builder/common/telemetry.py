"""Telemetry of the libraries and servers that the project uses: switched off, unless the user sets a variable.

ONNX Runtime from 1.29 reports each process, session and model to Microsoft and keeps an identifier of the machine in
~/.cache/Microsoft; it reads its variable as the library is loaded, and its Python function comes too late.
Sources: microsoft/onnxruntime, pull requests 27379 and 29843; vLLM, docs/usage/usage_stats.md; TensorRT-LLM,
tensorrt_llm/usage/usage_lib.py; huggingface_hub, HF_HUB_DISABLE_TELEMETRY; Ray, "Usage Stats Collection".
"""

from __future__ import annotations

import os

OFF = {
    "ORT_DISABLE_TELEMETRY": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "TRTLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}


def switch_off() -> None:
    """Set the variables for this process and those that it starts; a variable that is set stays as it is."""
    for name, value in OFF.items():
        os.environ.setdefault(name, value)
