"""Bad requests to a real Triton: a clear error for each, and a server that stays up."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpc
from tritonclient.utils import InferenceServerException

from builder.common.errors import ServeError, SpecError
from builder.common.samples import TEXTS
from builder.serving.client.client import Client
from builder.serving.server.triton import TritonServer


@pytest.mark.parametrize(
    ("name", "sample", "message"),
    [
        ("topics", {"text_input": b"caf\xe9"}, "byte 3 is not UTF-8"),
        ("topics", {"text_input": ""}, "is empty"),
        ("topics", {"text_input": "x " * 500_000}, "the limit of this model is 512"),
        ("topics", {"text_input": "x" * 1_000_000, "text_pair": "y " * 1000}, "the limit of this model is 512"),
        ("topics", {"text_input": "x " * 600_000}, "the request has 1200000 bytes of text; this model takes at most"),
        (
            "ranks",
            {"query": "a", "documents": ["b"] * 1001},
            "documents has 1001 values; this model takes at most 1000",
        ),
        ("ranks", {"query": "a", "documents": ["b " * 200] * 400}, "tokens in 400 rows; this model takes at most"),
        ("masks", {"text_input": "[MASK] " * 30, "top_k": 40}, "predictions, top_k for each mask, has 1200 values"),
        ("writes", {"text_input": "x " * 600_000}, "the request has 1200000 bytes of text; this model takes at most"),
        ("writes", {"text_input": "x", "stop_words": ["y"] * 1001}, "stop_words has 1001 values; this model takes at"),
        (
            "writes_bls",
            {"text_input": "x " * 600_000},
            "the request has 1200000 bytes of text; this model takes at most",
        ),
        ("sums", {"text_input": "x " * 600_000}, "the request has 1200000 bytes of text; this model takes at most"),
        ("sums", {"text_input": "x", "stop_words": ["y"] * 1001}, "stop_words has 1001 values; this model takes at"),
        (
            "minilm_fp32",
            {"text_input": "x " * 600_000},
            "the request has 1200000 bytes of text; this model takes at most",
        ),
        ("topics", {"text_input": "a", "top_k": 0}, "top_k is 0; expected at least 1"),
        ("topics", {"text_input": "a", "function_to_apply": "relu"}, "expected one of softmax, sigmoid, none"),
        ("entail", {"text_input": "a", "candidate_labels": [""]}, "candidate_labels, row 0, is empty"),
        ("entail", {"text_input": "a", "candidate_labels": ["b"], "hypothesis_template": "none"}, "expected {} once"),
        ("entail", {"text_input": "a", "candidate_labels": ["b"], "hypothesis_template": "{0.x}"}, "expected {} once"),
        ("names", {"text_input": "a", "aggregation_strategy": "best"}, "expected one of none, simple, first"),
        ("answers", {"question": "word " * 200, "context": "a"}, "shorten the question"),
        ("answers", {"question": "a", "context": TEXTS[30], "doc_stride": 200}, "send a smaller doc_stride"),
        ("answers", {"question": "a", "context": "b", "max_answer_len": 0}, "max_answer_len is 0"),
        ("masks", {"text_input": "no mask here"}, r"has no \[MASK\] in it"),
        ("masks", {"text_input": "[MASK]", "targets": ["not one token"]}, "not single tokens"),
        ("features", {"text_input": "\x00\x01"}, None),
    ],
)
def test_invalid_request_is_refused_with_the_expected_value(
    name: str, sample: dict[str, Any], message: str | None, client: Callable[[str], Client]
) -> None:
    served = client(name)
    if message is None:
        assert np.isfinite(served.ask(sample)["embedding"]).all()
    else:
        with pytest.raises(ServeError, match=message):
            served.ask(sample)
    with grpc.InferenceServerClient(served.url) as control:
        assert control.is_server_ready()
        assert control.is_model_ready(name)


def test_generate_refuses_an_unknown_field(server: TritonServer) -> None:
    """Regression: encoders ignored a misspelt option, which Triton's /generate passes as a parameter."""
    url = f"http://{server.host}:{server.ports.http}/v2/models/names/generate"
    body = {"id": "42", "text_input": "Mario Rossi moved."}
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode()), timeout=300) as response:
        assert "entities" in json.load(response), "an id is of the protocol"
    body["aggregation_strategi"] = "simple"
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode()), timeout=300)
    assert "'aggregation_strategi' is not an input of this model; it has text_input" in refused.value.read().decode()


def test_truncate_option_truncates_long_texts(client: Callable[[str], Client]) -> None:
    served = client("minilm_fp32")
    long = " ".join(TEXTS)
    answer = served.ask({"text_input": long, "truncate": True})
    assert answer["truncated"] is True
    assert abs(np.linalg.norm(answer["embedding"]) - 1) < 1e-5
    with pytest.raises(ServeError, match="the limit of this model is 256"):
        served.ask({"text_input": long})


def test_client_refuses_invalid_values_before_sending(client: Callable[[str], Client]) -> None:
    served = client("topics")
    with pytest.raises(SpecError, match="'texts' is not an input of this model; it has text_input"):
        served.ask({"texts": "a"})
    with pytest.raises(SpecError, match="text_input is missing"):
        served.ask({"top_k": 1})
    with pytest.raises(SpecError, match="top_k is 'many'; expected INT32"):
        served.ask({"text_input": "a", "top_k": "many"})


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"text_input": np.zeros((1, 1), np.float32)}, "FP32"),
        ({"text_input": np.array([[b"a", b"b"]], dtype=object)}, "unexpected shape"),
        ({"text_input": np.array([b"a"], dtype=object)}, "unexpected shape"),
        ({"text_input": np.zeros((0, 1), dtype=object)}, "."),
        ({"text_input": np.array([[b"a"]] * 65, dtype=object)}, "batch-size must be <= 64"),
        ({"text_input": np.array([[b"a"]] * 3, dtype=object), "text_pair": np.array([[b"a"]], dtype=object)}, "."),
        ({"other": np.array([[b"a"]], dtype=object)}, "unexpected inference input"),
    ],
)
def test_triton_refuses_a_wrong_dtype_shape_or_name(
    tensors: dict[str, np.ndarray], message: str, server: TritonServer
) -> None:
    types = {"O": "BYTES", "f": "FP32"}
    inputs = []
    for name, array in tensors.items():
        tensor = grpc.InferInput(name, list(array.shape), types[array.dtype.kind])
        tensor.set_data_from_numpy(array)
        inputs.append(tensor)
    with grpc.InferenceServerClient(server.url) as control:
        with pytest.raises(InferenceServerException, match=message):
            control.infer("topics", inputs)
        assert control.is_model_ready("topics")


def test_client_reports_an_unknown_model_and_a_missing_server(server: TritonServer) -> None:
    with pytest.raises(ServeError, match="nobody is not served at"):
        Client(server.url, "nobody")
    with pytest.raises(ServeError, match="no Triton answers at 127"):
        Client("127.0.0.1:1", "topics")
