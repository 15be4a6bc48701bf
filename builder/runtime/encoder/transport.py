"""Convert between Triton's requests and responses and a pipeline's arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils  # type: ignore[import-not-found]  # provided by Triton

from ..fields import InputError, readable, refuse_parameters
from .pipeline import Answer
from .request_queue import RequestRefused


def refusal(request: Any, names: Sequence[str]) -> Any:
    """Return the error of a request with anything but the inputs `names`; None for any other."""
    try:
        refuse_parameters(request.parameters(), names)
    except InputError as error:
        return response(error)
    return None


def tensors_of(request: Any, names: Sequence[str]) -> dict[str, np.ndarray]:
    """Return the tensors of a request among the inputs `names`."""
    tensors = {name: pb_utils.get_input_tensor_by_name(request, name) for name in names}
    return {name: tensor.as_numpy() for name, tensor in tensors.items() if tensor is not None}


def response(answer: Answer | BaseException) -> Any:
    """Return an answer as a Triton response: errors of the request with their code, others as the model's own."""
    if isinstance(answer, InputError):
        return pb_utils.InferenceResponse(
            error=pb_utils.TritonError(readable(answer), pb_utils.TritonError.INVALID_ARG)
        )
    if isinstance(answer, RequestRefused):
        return pb_utils.InferenceResponse(
            error=pb_utils.TritonError(readable(answer), pb_utils.TritonError.UNAVAILABLE)
        )
    if isinstance(answer, BaseException):
        pb_utils.Logger.log_error(f"{type(answer).__name__}: {readable(answer)}")
        message = f"this request failed inside the model: {type(answer).__name__}: {readable(answer)}"
        return pb_utils.InferenceResponse(error=pb_utils.TritonError(message, pb_utils.TritonError.INTERNAL))
    return pb_utils.InferenceResponse([pb_utils.Tensor(name, array) for name, array in answer.items()])
