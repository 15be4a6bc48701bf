"""The client against missing or fake servers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from tritonclient import grpc
from tritonclient.grpc import service_pb2

from builder.common.errors import ServeError
from builder.runtime.fields import Field
from builder.serving.client.client import Client, Signature
from builder.serving.client.responses import Responses


def test_responses_report_a_refused_connection() -> None:
    responses = Responses("127.0.0.1:1", service_pb2.ModelInferRequest(model_name="front"), 60)
    with pytest.raises(ServeError, match=r"front: the server at 127\.0\.0\.1:1 does not answer: .*connect"):
        next(iter(responses))
    responses.close()


@pytest.mark.parametrize("question", ["statistics", "server"])
def test_client_reports_a_stopped_server(question: str) -> None:
    """Regression: a server that stopped between two requests, as in a load test, caused a gRPC traceback."""
    client = object.__new__(Client)
    client.name, client._client = "front", grpc.InferenceServerClient("127.0.0.1:1")
    with client._client, pytest.raises(ServeError, match=r"front: .*127\.0\.0\.1:1"):
        getattr(client, question)()


class FakeClient(Client):
    """Client of a server that answers at once; `sent`: the requests to it."""

    def __init__(self, *inputs: Field) -> None:
        self.signature = Signature(inputs, (), {}, streams=True)
        self.sent: dict[str, Any] = {}

    def stream(self, sample: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        self.sent = dict(sample)
        yield {"text_output": "whole"}


@pytest.mark.parametrize("name", ["stream", "streaming"])
def test_client_requests_whole_answers(name: str) -> None:
    """TensorRT-LLM's model calls the input `streaming`; if it were set, only the last piece would be returned."""
    client = FakeClient(Field("text_input", "TYPE_STRING", (1,)), Field(name, "TYPE_BOOL", (1,), True))
    assert client.ask({"text_input": "x", name: True}) == {"text_output": "whole"}
    assert client.sent == {"text_input": "x", name: False}
