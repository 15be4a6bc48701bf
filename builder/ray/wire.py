"""What goes between a gateway and a replica: it pickles, which an ApiError does not."""

from __future__ import annotations

from dataclasses import dataclass

from builder.gateway.errors import ApiError
from builder.gateway.tensors import Outputs


@dataclass(frozen=True)
class Refusal:
    """An ApiError, on its way."""

    status: int
    message: str
    param: str | None
    code: str | None
    retry_after: float | None


Answer = Outputs | Refusal


def refusal(error: ApiError) -> Refusal:
    """What a replica answers instead of raising `error`."""
    return Refusal(error.status, error.message, error.param, error.code, error.retry_after)


def outputs(answer: Answer) -> Outputs:
    """The outputs that a replica answered. Raises the ApiError that it refused with."""
    if not isinstance(answer, Refusal):
        return answer
    raise ApiError(answer.status, answer.message, param=answer.param, code=answer.code, retry_after=answer.retry_after)
