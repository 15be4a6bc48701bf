"""Load TensorRT-LLM's own Triton model from its container; emitted as model.py, beside its model.yaml.

Source: triton-inference-server/tensorrtllm_backend, docs/llmapi.md; the container has the template under /app.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

TEMPLATE = Path("/app/all_models/llmapi/tensorrt_llm/1")


def load_template(folder: Path) -> Any:
    """Import the module of the container's model. Raises RuntimeError outside that container."""
    if not (folder / "model.py").is_file():
        raise RuntimeError(
            f"{folder / 'model.py'} is not there: this model runs in the trtllm-python-py3 container of its release"
        )
    sys.path.insert(0, str(folder))  # it imports helpers.py from the same folder
    spec = importlib.util.spec_from_file_location("tensorrt_llm_template", folder / "model.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up their module
    spec.loader.exec_module(module)
    return module


TritonPythonModel = load_template(TEMPLATE).TritonPythonModel
