"""Overload on a real Triton: some requests are refused, and all answers are correct."""

from __future__ import annotations

import re
import time
import urllib.request
from collections import Counter
from collections.abc import Callable

import grpc
import numpy as np
import pytest
from tritonclient.grpc import InferenceServerClient, InferResult, service_pb2_grpc

from builder.checkpoints.distances import difference
from builder.common.samples import TEXTS
from builder.common.tensors import to_tensors, to_values
from builder.serving.client.client import Client
from builder.serving.server.triton import TritonServer
from tests.served.patience import comes_about

BURST = 1200  # more than the 1000 payloads that Triton keeps for all models
FLOOD, ROWS = 200, 40  # rows: more than half of a batch of 64, so that no two requests share one
COUNTERS = ("refused", "waited_seconds")


def _flood(
    client: Client, tensors: dict[str, np.ndarray], meanwhile: Callable[[], None] = lambda: None
) -> tuple[list[InferResult], Counter[str]]:
    """Return the answers to many requests at once, and the statuses of those that were refused.

    `meanwhile` is called when the first is answered.
    """
    request, answers, refused = client._request(tensors), [], Counter[str]()
    with grpc.insecure_channel(client.url) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        futures = [stub.ModelInfer.future(request, timeout=600) for _ in range(FLOOD)]
        futures[0].exception()
        meanwhile()
        for future in futures:
            error = future.exception()
            if error is None:
                answers.append(InferResult(future.result()))
            else:
                refused[error.code().name] += 1
    return answers, refused


def _many(client: Client, sample: dict[str, str]) -> dict[str, np.ndarray]:
    tensors = to_tensors(sample, client.signature.inputs)
    return {name: np.repeat(array, ROWS, axis=0) for name, array in tensors.items()}


def _counted(server: TritonServer, name: str, counter: str) -> float:
    text = urllib.request.urlopen(f"http://{server.host}:{server.ports.metrics}/metrics", timeout=300).read().decode()
    found = re.search(rf'build_repo_{counter}_total{{model="{name}",version="1"}} (\S+)', text)
    assert found is not None
    return float(found[1])


@pytest.mark.parametrize("name", ["features", "masks"])
def test_flood_is_partly_refused_and_answered_correctly(
    name: str, server: TritonServer, client: Callable[[str], Client]
) -> None:
    """Cover engines in process and through BLS, with a queue of three requests."""
    served, sample = client(name), {"text_input": f"{TEXTS[5]} [MASK]"}
    expected, before = served.ask(sample), [_counted(server, name, counter) for counter in COUNTERS]
    answers, refused = _flood(served, _many(served, sample))
    assert set(refused) <= {"UNAVAILABLE"}, "how many depends on how fast it is"
    assert len(answers) + refused.total() == FLOOD
    for answer in answers[:: 1 + len(answers) // 16]:  # comparing all would take longer than the flood
        arrays = {output.name: answer.as_numpy(output.name) for output in answer.get_response().outputs}
        error, where = difference([expected] * ROWS, to_values(arrays, served.signature.outputs))
        assert error < 1e-5, where
    assert difference(expected, served.ask(sample))[0] < 1e-5, "it goes on as before"
    time.sleep(1.1)  # counts are published with the first batch of each second
    served.ask(sample)
    grown = [_counted(server, name, counter) - was for counter, was in zip(COUNTERS, before, strict=True)]
    assert grown[0] == refused.total()
    assert grown[1] > 0 or not refused, "the others waited in the front, which Triton's own figures do not have"


def test_unloading_in_a_flood_answers_or_refuses_every_request(
    server: TritonServer, client: Callable[[str], Client]
) -> None:
    """The front must answer the requests that it accepted, or it could never be unloaded."""
    served, sample = client("features"), {"text_input": TEXTS[5]}
    expected = served.ask(sample)
    with InferenceServerClient(server.url) as control:
        try:
            answers, refused = _flood(served, _many(served, sample), lambda: control.unload_model("features"))
            assert set(refused) <= {"UNAVAILABLE", "NOT_FOUND"}, "Triton knows no such model once it is gone"
            assert len(answers) + refused.total() == FLOOD
            assert answers
            assert comes_about(lambda: _state(server, "features") == ("UNAVAILABLE", "unloaded"))
        finally:
            control.load_model("features")
    assert difference(expected, served.ask(sample))[0] < 1e-5


def test_burst_at_a_decoder_waits_in_one_queue(server: TritonServer, client: Callable[[str], Client]) -> None:
    """Regression: each waiting request had its own payload in Triton.

    With a thousand payloads, the dynamic batcher of any model unlocks freed memory (core, dynamic_batch_scheduler.cc,
    BatcherThread; fixed in release 26.11).
    """
    decoder, encoder = client("writes"), client("features")
    with InferenceServerClient(server.url) as control:
        assert "dynamic_batching" in control.get_model_config("writes", as_json=True)["config"]
    sample = {"text_input": "The museum in Oslo", "max_tokens": 3, "ignore_eos": True, "stream": False}
    expected, features = decoder.ask(sample), encoder.ask({"text_input": TEXTS[5]})
    request = decoder._request(to_tensors(sample, decoder.signature.inputs, decoder.signature.batched))
    outcomes = Counter[str]()
    with grpc.insecure_channel(server.url) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        for message in stub.ModelStreamInfer(iter([request] * BURST), timeout=120):
            if message.error_message:
                assert "wait already" in message.error_message
                outcomes["refused"] += 1
                continue
            (text,) = InferResult(message.infer_response).as_numpy("text_output")
            outcomes["answered" if [text.decode()] == expected["text_output"] else "wrong"] += 1
    assert outcomes.total() == BURST
    assert outcomes["answered"] > 0
    assert not outcomes["wrong"]
    assert difference(features, encoder.ask({"text_input": TEXTS[5]}))[0] < 1e-5
    assert decoder.ask(sample)["text_output"] == expected["text_output"]


def _state(server: TritonServer, name: str) -> tuple[str, str]:
    return next((model.state, model.reason) for model in server.models() if model.name == name)
