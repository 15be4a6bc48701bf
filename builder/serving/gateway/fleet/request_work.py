"""Estimate the work of a request, and find the beginning of its prompt, without a tokenizer."""

from __future__ import annotations

from dataclasses import dataclass

from tritonclient.grpc import service_pb2

from builder.runtime.adapter_files import ADAPTER
from builder.serving.gateway.tensors import LENGTH, Outputs

BYTES_PER_TOKEN = 4  # of text, about; exact for token ids, which are INT32
DEFAULT_ANSWER_TOKENS = 256  # of a generated answer whose length the request does not limit
MAX_ANSWER_TOKENS = 4096  # of one answer: a higher limit is a precaution of the client, and few answers reach it
PREFIX_BYTES = 256  # two blocks of 32 tokens of a cache
PROMPTS = ("text_input", "messages", "input_ids")


@dataclass(frozen=True)
class RequestWork:
    """Work of a request in tokens: of its inputs, and of its answer at most.

    `prefix` identifies the model, its adapter and the beginning of the prompt; empty if the prompt is too short to
    share blocks of a cache. `streams`: the answer comes in pieces.
    """

    prompt: int
    answer: int = 0
    prefix: bytes = b""
    streams: bool = False

    @property
    def tokens(self) -> int:
        return self.prompt + self.answer

    @property
    def until_first_answer(self) -> int:
        """Tokens that are read or generated until the first answer."""
        return self.prompt if self.streams else self.tokens


def encoding_work(request: service_pb2.ModelInferRequest) -> RequestWork:
    """Return the work of a request that is answered once, such as an embedding."""
    return RequestWork(_input_tokens(request))


def generation_work(request: service_pb2.ModelInferRequest) -> RequestWork:
    """Return the work of a request to a model that generates."""
    inputs = {tensor.name: raw for tensor, raw in zip(request.inputs, request.raw_input_contents, strict=False)}
    length = _whole_number(inputs.get("max_tokens"), DEFAULT_ANSWER_TOKENS)
    answers = _whole_number(inputs.get("n"), 1)
    prompt = next((inputs[name] for name in PROMPTS if name in inputs), b"")
    prefix = b""
    if len(prompt) >= LENGTH.size + PREFIX_BYTES:
        adapter = inputs.get(ADAPTER.name, b"")
        prefix = request.model_name.encode() + b"\0" + adapter + b"\0" + _beginning(prompt)
    answer = min(max(0, length), MAX_ANSWER_TOKENS) * max(1, answers)
    return RequestWork(_input_tokens(request), answer, prefix, any(inputs.get("stream", b"")))


def answer_tokens(outputs: Outputs) -> int:
    """Return how many tokens a piece of an answer has, about: a model sends those of one step together."""
    text = outputs.get("text_output")
    return 1 if text is None else max(1, (len(text.raw) - LENGTH.size) // BYTES_PER_TOKEN)


def _input_tokens(request: service_pb2.ModelInferRequest) -> int:
    return 1 + sum(map(len, request.raw_input_contents)) // BYTES_PER_TOKEN


def _beginning(prompt: bytes) -> bytes:
    """Return the first bytes after a text's length, which differs between prompts that begin alike."""
    return prompt[LENGTH.size : LENGTH.size + PREFIX_BYTES]


def _whole_number(raw: bytes | None, default: int) -> int:
    return default if not raw else int.from_bytes(raw[:4], "little", signed=True)
