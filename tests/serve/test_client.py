"""The client, where there is nobody to ask."""

from __future__ import annotations

from typing import Any, cast

import pytest
import tritonclient.grpc as grpc
from tritonclient.utils import InferenceServerException

from builder.errors import ServeError
from builder.serve.client import Client


class BrokenConnection:
    """It is gone before a request is on its way."""

    def async_stream_infer(self, *request: Any, **options: Any) -> None:
        raise InferenceServerException("The stream is no longer in valid state")


def test_a_connection_that_is_gone_is_an_error_of_the_server() -> None:
    client = object.__new__(Client)
    client.url, client.name = "127.0.0.1:1", "front"
    with pytest.raises(
        ServeError, match=r"front: the server at 127\.0\.0\.1:1 does not answer: The stream is no longer"
    ):
        client._begin(cast("grpc.InferenceServerClient", BrokenConnection()), [])
