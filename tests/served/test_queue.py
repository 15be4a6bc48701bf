"""More requests than an encoder answers, on a real Triton: some are refused, none is answered wrongly."""

from __future__ import annotations

import os
import re
import shutil
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import grpc
import numpy as np
import pytest
from tritonclient.grpc import InferResult, service_pb2_grpc

from builder.runtime.contract import FILE, dump, load_encoder
from builder.serve.client import Client
from builder.serve.triton import Server, running
from builder.tensors import to_tensors

FLOOD, ROWS = 300, 40  # more than half of a batch of 64: no two share one
LIMIT = 3


@pytest.fixture(scope="module")
def limited(small_repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """`topics`, with room for three requests that wait."""
    folder = tmp_path_factory.mktemp("limited") / "model_repository"
    shutil.copytree(small_repository, folder, copy_function=os.link)
    serving = folder / "topics" / "1" / FILE
    changed = dump(replace(load_encoder(serving.parent), queue=LIMIT))
    serving.unlink()  # a link
    serving.write_text(changed)
    with running(folder) as server:
        yield server


def _flood(client: Client, text: str) -> tuple[list[np.ndarray], Counter[str]]:
    """The scores of those of many requests at once that were answered, and the statuses of the others."""
    tensors = to_tensors({"text_input": text}, client.signature.inputs)
    request = client._request({name: np.repeat(array, ROWS, axis=0) for name, array in tensors.items()})
    answers, refused = [], Counter[str]()
    with grpc.insecure_channel(client.url) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        for future in [stub.ModelInfer.future(request, timeout=60) for _ in range(FLOOD)]:
            error = future.exception()
            if error is None:
                answers.append(InferResult(future.result()).as_numpy("score"))
            else:
                refused[error.code().name] += 1
    return answers, refused


def _refused(server: Server) -> float:
    text = urllib.request.urlopen(f"http://{server.host}:{server.ports.metrics}/metrics", timeout=10).read().decode()
    found = re.search(r'build_repo_refused_total{model="topics",version="1"} (\S+)', text)
    assert found is not None
    return float(found[1])


def test_a_flood_is_refused_at_once_and_what_is_answered_is_right(limited: Server) -> None:
    with Client(limited.url, "topics") as client:
        expected = client.ask({"text_input": "a museum"})
        answers, refused = _flood(client, "a museum")
        assert set(refused) == {"UNAVAILABLE"}
        assert len(answers) + refused.total() == FLOOD
        for scores in answers:
            np.testing.assert_allclose(scores[:, 0], np.full(ROWS, expected["score"][0]), atol=1e-5)
        for _ in range(20):
            assert client.ask({"text_input": "a museum"}).keys() == expected.keys(), "it goes on as before"
        time.sleep(1.1)  # counts are sent with the first batch of each second
        client.ask({"text_input": "a"})
        assert _refused(limited) == refused.total()
