"""Call the engine as a Triton model of its own, by Triton's business logic scripting.

Version N of the front calls version N of its engine and no other, so that the two change together for every request.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils  # type: ignore[import-not-found]  # provided by Triton

from ...contract import EncoderServing

CALLS_AT_ONCE = 3  # the engine finds the next call waiting when it has finished one


class EngineError(RuntimeError):
    """The engine's model refused or failed a call."""


class Executor:
    """Calls the Triton model that `serving` names. `folder`: the front's version, whose name is its number."""

    def __init__(self, folder: Path, serving: EncoderServing) -> None:
        self.engine = serving.engine
        self.version = int(folder.name)
        self.outputs = list(serving.outputs)
        self.map_calls = ThreadPoolExecutor(CALLS_AT_ONCE).map

    def infer(self, feeds: dict[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        response = pb_utils.InferenceRequest(
            model_name=self.engine,
            model_version=self.version,
            requested_output_names=self.outputs,
            inputs=[pb_utils.Tensor(name, array) for name, array in feeds.items()],
            preferred_memory=pb_utils.PreferredMemory(pb_utils.TRITONSERVER_MEMORY_CPU),  # numpy cannot read GPU memory
        ).exec()
        if response.has_error():
            raise EngineError(f"{self.engine}: {response.error().message()}")
        return {name: pb_utils.get_output_tensor_by_name(response, name).as_numpy() for name in self.outputs}
