"""vLLM as an engine: Triton's backend of that name reads model.json, the fields of vLLM's AsyncEngineArgs.

Backend: triton-inference-server/vllm_backend, README.md and src/model.py. Nothing is exported for it and nothing of it
runs here. Knows fields; knows nothing about checkpoints.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from builder.errors import SpecError
from builder.runtime.fields import Field
from builder.spec import BuildSpec

BACKEND = "vllm"
MODEL_FILE = "model.json"
DTYPES = {"fp32": "auto", "fp16": "float16", "bf16": "bfloat16", "fp8": "auto"}  # fp32 is what nobody asked for
ARGUMENTS: dict[str, list[str]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))

# What the backend declares in every release; what newer ones have besides, it adds by itself.
INPUTS = (
    Field("text_input", "TYPE_STRING"),
    Field("stream", "TYPE_BOOL", optional=True),
    Field("sampling_parameters", "TYPE_STRING", optional=True),
    Field("exclude_input_in_output", "TYPE_BOOL", optional=True),
)
OUTPUTS = (Field("text_output", "TYPE_STRING", (-1,)),)


def engine_arguments(spec: BuildSpec, model: str, revision: str | None) -> dict[str, Any]:
    """What model.json says. Raises SpecError for an argument that no vLLM has."""
    _refuse_unknown(spec.vllm.arguments)
    arguments: dict[str, Any] = {
        "model": model,
        "dtype": DTYPES[spec.precision],
        "tensor_parallel_size": spec.vllm.tensor_parallel_size,
        "pipeline_parallel_size": spec.vllm.pipeline_parallel_size,
        "gpu_memory_utilization": spec.vllm.gpu_memory_utilization,
        "max_num_seqs": spec.slots,
    }
    optional = {
        "revision": revision,
        "tokenizer_revision": revision,
        "max_model_len": spec.max_length,
        "quantization": "fp8" if spec.precision == "fp8" else None,
    }
    arguments.update({name: value for name, value in optional.items() if value is not None})
    return {**arguments, **spec.vllm.arguments}


def _refuse_unknown(arguments: Mapping[str, object]) -> None:
    known = {name for names in ARGUMENTS.values() for name in names}
    for name in arguments:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            raise SpecError(
                f"vllm.arguments has {name!r}, which no vLLM knows ({', '.join(ARGUMENTS)} were read)"
                + (f"; did you mean {near[0]!r}?" if near else "")
            )
