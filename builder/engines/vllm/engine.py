"""vLLM: Triton's backend of that name reads model.json, the fields of vLLM's AsyncEngineArgs.

Backend: triton-inference-server/vllm_backend, README.md and src/model.py. Nothing is exported for it and nothing of it
runs here. Knows fields; knows nothing about checkpoints.
"""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from builder.common.engines import ENGINES
from builder.common.errors import SpecError
from builder.common.releases import RELEASES, version_tuple
from builder.engines import CheckpointEngine
from builder.engines.placement import InstanceGroup
from builder.options import VLLM, WholeCheckpoint
from builder.runtime.fields import Field

BACKEND = "vllm"
MODEL_FILE = ENGINES[BACKEND].model_file
DTYPES = {"fp32": "auto", "fp16": "float16", "bf16": "bfloat16", "fp8": "auto"}  # auto: the checkpoint's own
_READ = tomllib.loads(Path(__file__).with_name("arguments.toml").read_text("utf-8"))
VERSIONS: list[str] = _READ["versions"]  # whose fields were read, the oldest first
FIELDS: dict[str, tuple[str, str]] = _READ["fields"]  # by name, the first and the last version that has it

# Tensors that the backend declares in every release; newer ones add theirs by themselves.
INPUTS = (
    Field("text_input", "TYPE_STRING"),
    Field("stream", "TYPE_BOOL", optional=True),
    Field("sampling_parameters", "TYPE_STRING", optional=True),
    Field("exclude_input_in_output", "TYPE_BOOL", optional=True),
)
OUTPUTS = (Field("text_output", "TYPE_STRING", (-1,)),)


class Vllm(CheckpointEngine):
    backend = BACKEND
    group: ClassVar = InstanceGroup(1, "KIND_MODEL")  # vLLM chooses the devices
    dtypes: ClassVar = DTYPES
    inputs: ClassVar = INPUTS
    outputs: ClassVar = OUTPUTS
    share: ClassVar = "gpu_memory_utilization"
    request: ClassVar = {"text_input": "a", "max_tokens": 1}

    def files(self, options: VLLM, whole: WholeCheckpoint, model: str, revision: str | None) -> dict[str, bytes | Path]:
        """Return model.json. Raises SpecError for an argument that the vLLM of the release does not have."""
        _refuse_unknown(options.arguments, whole.triton)
        arguments: dict[str, Any] = {
            "model": model,
            "dtype": DTYPES[whole.precision],
            "tensor_parallel_size": options.tensor_parallel_size,
            "pipeline_parallel_size": options.pipeline_parallel_size,
            "gpu_memory_utilization": options.gpu_memory_utilization,
        }
        optional = {
            "max_num_seqs": whole.slots,  # None lets vLLM choose it by the card's memory
            "revision": revision,
            "tokenizer_revision": revision,
            "max_model_len": whole.max_length,
            "quantization": "fp8" if whole.precision == "fp8" else None,
        }
        arguments.update({name: value for name, value in optional.items() if value is not None})
        document = json.dumps({**arguments, **options.arguments}, indent=1)
        return {f"1/{MODEL_FILE}": document.encode()}


def fields_of(version: str) -> set[str]:
    """Return the fields of a vLLM's AsyncEngineArgs; for a version that was not read, those of the one before it."""
    number = version_tuple(version.partition("rc")[0])  # a release candidate has those of its release
    older = [index for index, read in enumerate(VERSIONS) if version_tuple(read) <= number]
    return {name for name in FIELDS if older and older[-1] in _places(name)}


def _places(name: str) -> range:
    """Return the places in `VERSIONS` of those that have a field."""
    first, last = FIELDS[name]
    return range(VERSIONS.index(first), VERSIONS.index(last) + 1)


def _refuse_unknown(arguments: Mapping[str, object], triton: str) -> None:
    version = RELEASES[triton].vllm
    known = fields_of(version) if version else set(FIELDS)
    here = f"vLLM {version}, which Triton {triton} carries, does" if version else "any vLLM that was read does"
    for name in arguments:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            elsewhere = FIELDS.get(name)
            raise SpecError(
                f"vllm.arguments has {name!r}, and {here} not know it"
                + (
                    f"; vLLM {elsewhere[0]} to {elsewhere[1]} does: choose its release with --triton"
                    if elsewhere
                    else ""
                )
                + (f"; did you mean {near[0]!r}?" if near and not elsewhere else "")
            )


ENGINE = Vllm()
