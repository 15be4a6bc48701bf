"""The model that a server is asked for to know that it answers: it returns its input."""

from __future__ import annotations

from typing import Any

import triton_python_backend_utils as pb_utils  # type: ignore[import-not-found]


class TritonPythonModel:
    def execute(self, requests: list[Any]) -> list[Any]:
        tensors = [pb_utils.get_input_tensor_by_name(request, "asked").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("answered", tensor)]) for tensor in tensors]
