"""Between Triton's requests and responses and the arrays of a pipeline, and what it counts on Triton's /metrics."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils  # type: ignore[import-not-found]  # provided by Triton

from ..fields import InputError, readable, refuse_parameters
from .pipeline import Answer, Counts
from .waiting import Refused


def refusal(request: Any, names: Sequence[str]) -> Any:
    """The error of a request that says more than the inputs `names`; None for any other."""
    try:
        refuse_parameters(request.parameters(), names)
    except InputError as error:
        return response(error)
    return None


def tensors_of(request: Any, names: Sequence[str]) -> dict[str, np.ndarray]:
    """Those of the inputs `names` that a request has."""
    tensors = {name: pb_utils.get_input_tensor_by_name(request, name) for name in names}
    return {name: tensor.as_numpy() for name, tensor in tensors.items() if tensor is not None}


def response(answer: Answer | BaseException) -> Any:
    """An answer as Triton sends it: an error of the request with the code for that, any other as the model's own."""
    if isinstance(answer, InputError):
        return pb_utils.InferenceResponse(
            error=pb_utils.TritonError(readable(answer), pb_utils.TritonError.INVALID_ARG)
        )
    if isinstance(answer, Refused):
        return pb_utils.InferenceResponse(
            error=pb_utils.TritonError(readable(answer), pb_utils.TritonError.UNAVAILABLE)
        )
    if isinstance(answer, BaseException):
        pb_utils.Logger.log_error(f"{type(answer).__name__}: {readable(answer)}")
        message = f"this request failed inside the model: {type(answer).__name__}: {readable(answer)}"
        return pb_utils.InferenceResponse(error=pb_utils.TritonError(message, pb_utils.TritonError.INTERNAL))
    return pb_utils.InferenceResponse([pb_utils.Tensor(name, array) for name, array in answer.items()])


class Metrics:
    """Counters on Triton's own /metrics: engine calls, tokens of texts, tokens that only pad a batch, requests
    that were refused, and how long others waited in the front.

    Each increment is a message to the server, so they are sent with the first batch of each second.
    """

    def __init__(self, model: str, version: str) -> None:
        self.families = {  # kept: a metric dies with its family
            name: pb_utils.MetricFamily(
                name=f"build_repo_{name}_total", description=description, kind=pb_utils.MetricFamily.COUNTER
            )
            for name, description in (
                ("engine_calls", "Calls of the engine"),
                ("tokens", "Tokens of the texts, special tokens included"),
                ("padding_tokens", "Tokens added to texts to make them as long as their batch mates"),
                ("refused", "Requests that were refused because too many waited, or for too long"),
                ("waited_seconds", "Time that requests waited in the front, after Triton's own queue"),
            )
        }
        # of this version alone: a metric of another process with the same labels goes when the first of them ends
        labels = {"model": model, "version": version}
        self.counters = {name: family.Metric(labels=labels) for name, family in self.families.items()}
        self.loaded = pb_utils.MetricFamily(
            name="build_repo_loaded_timestamp_seconds",
            description="When the model was loaded, in seconds since 1970",
            kind=pb_utils.MetricFamily.GAUGE,
        )
        self.loaded_at = self.loaded.Metric(labels=labels)
        self.loaded_at.set(time.time())
        self.sent, self.refused, self.waited_s = Counts(), 0, 0.0
        self.sent_at = 0.0

    def publish(self, counts: Counts, refused: int, waited_s: float) -> None:
        """Add what came since the last time."""
        if time.monotonic() - self.sent_at < 1:
            return
        tokens = counts.tokens - self.sent.tokens
        self.counters["engine_calls"].increment(counts.calls - self.sent.calls)
        self.counters["tokens"].increment(tokens)
        self.counters["padding_tokens"].increment(counts.padded_tokens - self.sent.padded_tokens - tokens)
        self.counters["refused"].increment(refused - self.refused)
        self.counters["waited_seconds"].increment(waited_s - self.waited_s)
        self.sent, self.refused, self.waited_s = replace(counts), refused, waited_s
        self.sent_at = time.monotonic()
