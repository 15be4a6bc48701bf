"""The client, where there is nobody to ask."""

from __future__ import annotations

import pytest
from tritonclient.grpc import service_pb2

from builder.errors import ServeError
from builder.serve.responses import Responses


def test_a_connection_that_is_gone_is_an_error_of_the_server() -> None:
    responses = Responses("127.0.0.1:1", service_pb2.ModelInferRequest(model_name="front"), 60)
    with pytest.raises(ServeError, match=r"front: the server at 127\.0\.0\.1:1 does not answer: .*connect"):
        next(iter(responses))
    responses.close()
