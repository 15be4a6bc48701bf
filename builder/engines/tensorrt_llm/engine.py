"""TensorRT-LLM: its own Triton model, which its container carries, reads model.yaml.

Template: NVIDIA/TensorRT-LLM, triton_backend/all_models/llmapi (config.pbtxt, 1/model.yaml, 1/helpers.py); how it is
used: triton-inference-server/tensorrtllm_backend, docs/llmapi.md. Nothing is exported for it, and it
does not run here.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import yaml

from builder.common.distribution import RUNTIME
from builder.common.engines import ENGINES
from builder.common.errors import SpecError
from builder.common.releases import version_tuple
from builder.engines import CheckpointEngine
from builder.engines.placement import InstanceGroup
from builder.options import TensorRTLLM, WholeCheckpoint
from builder.runtime.fields import Field

NAME = "tensorrt-llm"
MODEL_FILE = ENGINES[NAME].model_file
SINCE = "25.05"  # the first release whose backend documents it
DTYPES = {"fp32": "auto", "fp16": "float16", "bf16": "bfloat16"}  # auto: the checkpoint's own

_SAMPLING = {
    "best_of": "TYPE_INT32",
    "temperature": "TYPE_FP32",
    "top_k": "TYPE_INT32",
    "top_p": "TYPE_FP32",
    "frequency_penalty": "TYPE_FP32",
    "presence_penalty": "TYPE_FP32",
    "max_tokens": "TYPE_INT32",
    "seed": "TYPE_UINT64",
    "exclude_input_from_output": "TYPE_BOOL",
}
_RETURNED = {"finish_reason": "TYPE_STRING", "stop_reason": "TYPE_STRING", "cumulative_logprob": "TYPE_FP32"}
INPUTS = (
    Field("text_input", "TYPE_STRING", (-1,)),
    Field("streaming", "TYPE_BOOL", optional=True),
    *(Field(f"sampling_param_{name}", kind, optional=True) for name, kind in _SAMPLING.items()),
    Field("sampling_param_stop", "TYPE_STRING", (-1,), optional=True),
    *(Field(f"return_{name}", "TYPE_BOOL", optional=True) for name in _RETURNED),
    Field("stop", "TYPE_BOOL", optional=True),
)
OUTPUTS = (Field("text_output", "TYPE_STRING", (-1,)), *(Field(n, kind, (-1,)) for n, kind in _RETURNED.items()))


class TensorRtLlm(CheckpointEngine):
    backend = "python"
    group: ClassVar = InstanceGroup(1)  # as in its template: TensorRT-LLM chooses the devices
    dtypes: ClassVar = DTYPES
    inputs: ClassVar = INPUTS
    outputs: ClassVar = OUTPUTS
    request: ClassVar = {"text_input": "a", "sampling_param_max_tokens": 1}

    def files(
        self, options: TensorRTLLM, whole: WholeCheckpoint, model: str, revision: str | None
    ) -> dict[str, bytes | Path]:
        """Return its model, and model.yaml: arguments of tensorrt_llm.LLM, and Triton's own.

        Raises SpecError for an older release.
        """
        if version_tuple(whole.triton) < version_tuple(SINCE):
            raise SpecError(
                f"--engine {NAME} needs --triton {SINCE} or later: before, TensorRT-LLM had no Triton model that takes "
                "a checkpoint as it is"
            )
        optional = {"revision": revision, "max_seq_len": whole.max_length, "max_batch_size": whole.slots}
        document = {
            "model": model,
            "backend": "pytorch",
            "dtype": DTYPES[whole.precision],
            "tensor_parallel_size": options.tensor_parallel_size,
            "pipeline_parallel_size": options.pipeline_parallel_size,
            "kv_cache_config": {"free_gpu_memory_fraction": options.free_gpu_memory_fraction},
            **{name: value for name, value in optional.items() if value is not None},
            "triton_config": {"max_batch_size": 0, "decoupled": True},
        }
        arguments = yaml.safe_dump(document, sort_keys=False).encode()
        return {f"1/{MODEL_FILE}": arguments, "1/model.py": RUNTIME / "tensorrt_llm_model.py"}


ENGINE = TensorRtLlm()
