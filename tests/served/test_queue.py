"""More requests than an encoder answers, on a real Triton: some are refused, none is answered wrongly."""

from __future__ import annotations

import re
import time
import urllib.request
from collections import Counter
from collections.abc import Callable

import grpc
import numpy as np
import pytest
from tritonclient.grpc import InferResult, service_pb2_grpc

from builder.samples import TEXTS
from builder.serve.client import Client
from builder.serve.triton import Server
from builder.tensors import to_tensors, to_values
from builder.verify.answers import difference

FLOOD, ROWS = 200, 40  # more than half of a batch of 64: no two share one


def _flood(client: Client, tensors: dict[str, np.ndarray]) -> tuple[list[InferResult], Counter[str]]:
    """What came of many requests at once: answers, and the statuses of those that were refused."""
    request, answers, refused = client._request(tensors), [], Counter[str]()
    with grpc.insecure_channel(client.url) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        for future in [stub.ModelInfer.future(request, timeout=60) for _ in range(FLOOD)]:
            error = future.exception()
            if error is None:
                answers.append(InferResult(future.result()))
            else:
                refused[error.code().name] += 1
    return answers, refused


def _refused(server: Server, name: str) -> float:
    text = urllib.request.urlopen(f"http://{server.host}:{server.ports.metrics}/metrics", timeout=10).read().decode()
    found = re.search(rf'build_repo_refused_total{{model="{name}",version="1"}} (\S+)', text)
    assert found is not None
    return float(found[1])


@pytest.mark.parametrize("name", ["features", "masks"])
def test_a_flood_is_refused_and_what_is_answered_is_right(
    name: str, server: Server, client: Callable[[str], Client]
) -> None:
    """In process and through BLS. Three requests may wait, and the front looks at the first batch that it finds."""
    served, sample = client(name), {"text_input": f"{TEXTS[5]} [MASK]"}
    tensors = {k: np.repeat(array, ROWS, axis=0) for k, array in to_tensors(sample, served.signature.inputs).items()}
    expected, before = served.ask(sample), _refused(server, name)
    answers, refused = _flood(served, tensors)
    assert set(refused) == {"UNAVAILABLE"}
    assert len(answers) + refused.total() == FLOOD
    for answer in answers:
        arrays = {output.name: answer.as_numpy(output.name) for output in answer.get_response().outputs}
        error, where = difference([expected] * ROWS, to_values(arrays, served.signature.outputs))
        assert error < 1e-5, where
    assert difference(expected, served.ask(sample))[0] < 1e-5, "it goes on as before"
    time.sleep(1.1)  # counts are sent with the first batch of each second
    served.ask(sample)
    assert _refused(server, name) - before == refused.total()
