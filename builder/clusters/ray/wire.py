"""Answers between a gateway and a replica, which can be pickled; an ApiError cannot."""

from __future__ import annotations

from dataclasses import dataclass

from builder.serving.gateway.errors import ApiError
from builder.serving.gateway.tensors import Outputs


@dataclass(frozen=True)
class Refusal:
    """ApiError in a form that can be pickled."""

    status: int
    message: str
    param: str | None
    code: str | None
    retry_after: float | None


Answer = Outputs | Refusal


def to_refusal(error: ApiError) -> Refusal:
    """Return the answer with which a replica replaces raising `error`."""
    return Refusal(error.status, error.message, error.param, error.code, error.retry_after)


def outputs_of(answer: Answer) -> Outputs:
    """Return the outputs of a replica's answer. Raises the ApiError if the answer is a refusal."""
    if not isinstance(answer, Refusal):
        return answer
    raise ApiError(answer.status, answer.message, param=answer.param, code=answer.code, retry_after=answer.retry_after)
