"""Requests in the format of Triton's vLLM and TensorRT-LLM backends, sent to a real Triton."""

from __future__ import annotations

import json
import queue
import urllib.request
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpc
from tritonclient.utils import np_to_triton_dtype

from builder.serving.client.client import Client
from builder.serving.server.triton import TritonServer

Connect = Callable[[str], Client]


def streamed(server: TritonServer, model: str, tensors: dict[str, np.ndarray]) -> list[Any]:
    """Return the responses to one request over a gRPC stream, without the empty last one."""
    arrived: queue.SimpleQueue[Any] = queue.SimpleQueue()
    inputs = [
        grpc.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype)).set_data_from_numpy(array)
        for name, array in tensors.items()
    ]
    responses = []
    with grpc.InferenceServerClient(server.url) as client:
        client.start_stream(lambda result, error: arrived.put((result, error)))
        client.async_stream_infer(model, inputs, enable_empty_final_response=True)
        while True:
            result, error = arrived.get(timeout=300)
            assert error is None, error
            if result.get_response().outputs:
                responses.append(result)
            if result.get_response().parameters["triton_final_response"].bool_param:
                return responses


def texts(*strings: str) -> np.ndarray:
    return np.array([text.encode() for text in strings], np.object_)


def vllm(text: str, stream: bool, **sampling: Any) -> dict[str, np.ndarray]:
    """Return the tensors that NVIDIA's OpenAI front sends with --backend vllm.

    Source: server r26.08, _create_vllm_generate_request.
    """
    return {
        "text_input": texts(text),
        "stream": np.array([stream]),
        "exclude_input_in_output": np.array([True]),
        "sampling_parameters": texts(json.dumps(sampling)),
        "return_logprobs": np.array(["logprobs" in sampling]),
        "return_num_input_tokens": np.array([True]),
        "return_num_output_tokens": np.array([True]),
    }


@pytest.mark.parametrize("stream", [False, True])
def test_client_of_the_vllm_backend_gets_text(server: TritonServer, client: Connect, stream: bool) -> None:
    expected = client("writes").ask({"text_input": "The film", "max_tokens": 9, "temperature": 0.0, "ignore_eos": True})
    sampling = {"max_tokens": 9, "temperature": 0, "ignore_eos": True, "n": 1, "best_of": 1, "top_p": 1, "seed": 3}
    responses = streamed(server, "writes", vllm("The film", stream, **sampling))
    text = b"".join(response.as_numpy("text_output")[0] for response in responses)
    assert text.decode() == expected["text_output"][0]
    last = responses[-1]
    assert last.as_numpy("num_input_tokens").tolist() == [expected["prompt_tokens"]]
    assert sum(response.as_numpy("num_output_tokens").item() for response in responses) == 9, "of each response alone"
    assert last.as_numpy("num_output_tokens").dtype == np.uint32
    assert (len(responses) > 3) == stream


def test_guided_decoding_of_the_vllm_backend_is_applied(server: TritonServer) -> None:
    shape = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    guide = json.dumps({"json": {**shape, "additionalProperties": False}})
    (response,) = streamed(server, "writes", vllm("The film", False, max_tokens=40, guided_decoding=guide))
    assert isinstance(json.loads(response.as_numpy("text_output")[0])["a"], bool)


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_have_the_format_of_the_vllm_backend(
    server: TritonServer, client: Connect, stream: bool
) -> None:
    """NVIDIA's frontend expects an object by token ids for each position; the lowest rank is the chosen token."""
    greedy = {"text_input": "The film", "max_tokens": 5, "temperature": 0.0, "ignore_eos": True, "logprobs": 2}
    (expected,) = client("writes").ask(greedy)["logprobs_output"]
    sampling = {"max_tokens": 5, "temperature": 0, "ignore_eos": True, "logprobs": 2}
    responses = streamed(server, "writes", vllm("The film", stream, **sampling))
    written = [response.as_numpy("logprobs") for response in responses if response.as_numpy("logprobs") is not None]
    assert all(array.shape == (1,) for array in written)
    tokens = [token for array in written for token in json.loads(array[0])]
    own = json.loads(expected)
    chosen = [min(token.items(), key=lambda entry: entry[1]["rank"]) for token in tokens]
    assert [int(token) for token, _ in chosen] == [token["token"] for token in own]
    assert [entry["logprob"] for _, entry in chosen] == pytest.approx([token["logprob"] for token in own], abs=1e-3)
    assert [entry["decoded_token"] for _, entry in chosen] == [token["text"] for token in own]
    assert [len(token) for token in tokens] == [2] * 5


def test_tool_call_required_by_nvidias_openai_frontend(server: TritonServer) -> None:
    """The frontend sends these tensors to every backend but vLLM (server r26.08, _create_trtllm_generate_request)."""
    shape = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    tensors = {
        "text_input": texts("The film")[None],
        "stream": np.array([[False]]),
        "max_tokens": np.array([[40]], np.int32),
        "stop_words": texts("never said", "nor this")[None],
        "top_p": np.array([[1.0]], np.float32),
        "frequency_penalty": np.array([[0.0]], np.float32),
        "presence_penalty": np.array([[0.0]], np.float32),
        "seed": np.array([[3]], np.uint64),
        "temperature": np.array([[0.7]], np.float32),
        "guided_decoding_guide_type": texts("json_schema")[None],
        "guided_decoding_guide": texts(json.dumps({**shape, "additionalProperties": False}))[None],
        "return_num_input_tokens": np.array([[True]]),
        "return_num_output_tokens": np.array([[True]]),
    }
    (response,) = streamed(server, "writes_one", tensors)
    assert isinstance(json.loads(response.as_numpy("text_output")[0, 0])["a"], bool)
    assert response.as_numpy("num_output_tokens").shape == (1, 1)


def test_client_of_the_tensorrt_llm_backend_gets_text(server: TritonServer, client: Connect) -> None:
    """Send all inputs of NVIDIA's example client, in the shapes [1, 1] that the model was built for."""
    greedy = {"text_input": "The film", "max_tokens": 9, "temperature": 0.0, "ignore_eos": True}
    expected = client("writes_one").ask(greedy)
    tensors = {
        "text_input": texts("The film")[None],
        "max_tokens": np.array([[9]], np.int32),
        "bad_words": texts("")[None],
        "stop_words": texts("never said")[None],
        "end_id": np.array([[-1]], np.int32),
        "pad_id": np.array([[0]], np.int32),
        "top_k": np.array([[1]], np.int32),
        "top_p": np.array([[1.0]], np.float32),
        "temperature": np.array([[1.0]], np.float32),
        "length_penalty": np.array([[1.0]], np.float32),
        "repetition_penalty": np.array([[1.0]], np.float32),
        "min_length": np.array([[9]], np.int32),
        "presence_penalty": np.array([[0.0]], np.float32),
        "frequency_penalty": np.array([[0.0]], np.float32),
        "seed": np.array([[2**64 - 1]], np.uint64),
        "return_log_probs": np.array([[False]]),
        "beam_width": np.array([[1]], np.int32),
        "stream": np.array([[True]]),
    }
    responses = streamed(server, "writes_one", tensors)
    assert all(response.as_numpy("text_output").shape == (1, 1) for response in responses)
    text = b"".join(response.as_numpy("text_output")[0, 0] for response in responses)
    assert len(responses[-1].as_numpy("finish_reason")) == 1
    assert responses[-1].as_numpy("completion_tokens").tolist() == [[9]]
    assert text.decode() == expected["text_output"][0], "the most probable of one is the most probable of all"


def test_documented_tensorrt_llm_generate_request_is_answered(server: TritonServer) -> None:
    body = {"text_input": "The film", "max_tokens": 5, "bad_words": "", "stop_words": "", "pad_id": 2, "end_id": 2}
    for model in ("writes", "writes_one"):
        url = f"http://{server.host}:{server.ports.http}/v2/models/{model}/generate"
        with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode()), timeout=300) as answer:
            assert json.load(answer)["text_output"]
