"""A stand-in for gateway.triton.Triton, as strict about its requests as the models that it replaces."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import numpy as np
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2, service_pb2

from builder.runtime.adapter_files import ADAPTER
from builder.runtime.encoder.task import PROMPT_TOKENS, TRUNCATE, TRUNCATED
from builder.runtime.fields import Field
from builder.runtime.generation.options import COMMON, OUTPUTS, PROMPT, PROMPT_OUTPUTS
from builder.runtime.tokens import TOKENIZE, TOKENS
from builder.serving.gateway.backend import Backend, Metadata
from builder.serving.gateway.catalogue import ModelIndex
from builder.serving.gateway.errors import ApiError
from builder.serving.gateway.served_model import ServedModel
from builder.serving.gateway.tensors import LENGTH, Output

LONGEST = 64
SIZE = 4
CALL = '{"name":"look_up","arguments":{"city":"Oslo"}}'
SPOKEN = f"I look. <tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n{CALL}\n</tool_call>"
THOUGHT = "Is it far? No."
TEXT = Field("text_input", "TYPE_STRING")
FUNCTION = Field("function_to_apply", "TYPE_STRING", optional=True)
OPTIONS = (*COMMON, *PROMPT)
NEWER = (
    "guide",
    "chat_template_kwargs",
    "reasoning_effort",
    "continue_final_message",
    "prompt_logprobs",
    "input_ids",
    "return_num_output_tokens",
    "tokenize",
)
BEFORE_GUIDES = tuple(field for field in OPTIONS if field.name not in NEWER)
WITHOUT_TOKENS = tuple(field for field in OPTIONS if field.name not in ("tokenize", "input_ids"))
ENCODED = (TRUNCATED, PROMPT_TOKENS)
REPORT = (
    '{"variant":"int8","engine":"onnxruntime","target":"cpu","triton":"26.08","size":24300000,"speed_up":3.12,'
    '"latency_ms":{"1x16":1.9,"8x128":41.2},"metric":"cosine","quality":0.99614,"samples":32,"cpu":"A CPU","measured":'
    '"2026-11-22"}'
)
THINKS = '{"begin":"<think>","end":"</think>","special":true,"switch":true}'
GUIDED = {"chat": "true", "tool_parser": "hermes", "message_parts": '["user"]'}
MODELS: dict[str, tuple[str, Sequence[Field], Sequence[Field], dict[str, str]]] = {
    "writes": ("text-generation", BEFORE_GUIDES, OUTPUTS, {"chat": "true", "max_total_tokens": "64"}),
    "guided": ("text-generation", OPTIONS, (*OUTPUTS, *PROMPT_OUTPUTS), GUIDED),
    "thinks": ("text-generation", WITHOUT_TOKENS, (*OUTPUTS, *PROMPT_OUTPUTS), {**GUIDED, "thinking": THINKS}),
    "embeds": (
        "sentence-similarity",
        (TEXT, TRUNCATE, TOKENIZE),
        (Field("embedding", "TYPE_FP32", (SIZE,)), *ENCODED, TOKENS),
        {"max_input_length": "64", "report": REPORT},
    ),
    "features": (
        "feature-extraction",
        (TEXT, TRUNCATE),
        (Field("embedding", "TYPE_FP32", (-1, SIZE)), *ENCODED),
        {},
    ),
    "ranks": (
        "text-ranking",
        (Field("query", "TYPE_STRING"), Field("documents", "TYPE_STRING", (-1,)), FUNCTION, TRUNCATE),
        (Field("score", "TYPE_FP32", (-1,)), *ENCODED),
        {},
    ),
    "sparse": (
        "sparse-embedding",
        (TEXT, TRUNCATE),
        (Field("indices", "TYPE_INT32", (-1,)), Field("values", "TYPE_FP32", (-1,)), *ENCODED),
        {},
    ),
    "topics": (
        "text-classification",
        (
            TEXT,
            Field("text_pair", "TYPE_STRING", optional=True),
            Field("top_k", "TYPE_INT32", optional=True),
            FUNCTION,
            TRUNCATE,
        ),
        (Field("label", "TYPE_STRING", (-1,)), Field("score", "TYPE_FP32", (-1,)), *ENCODED),
        {"labels": '["a", "b"]'},
    ),
}


def config_of(name: str) -> model_config_pb2.ModelConfig:
    """Return the configuration of a model of `MODELS`; an empty one for others."""
    config = model_config_pb2.ModelConfig(name=name, max_batch_size=0)
    if name not in MODELS:
        return config
    task, inputs, outputs, parameters = MODELS[name]
    config.model_transaction_policy.decoupled = task == "text-generation"
    config.max_batch_size = 0 if task == "text-generation" else 8
    for fields, into in ((inputs, config.input), (outputs, config.output)):
        for field in fields:
            field_text = f'name: "{field.name}" data_type: {field.data_type} dims: {list(field.dims)}'
            text_format.Parse(field_text, into.add())
    for entry, field in zip(config.input, inputs, strict=True):
        entry.optional = field.optional
    for key, value in {"task": task, **parameters}.items():
        config.parameters[key].string_value = value
    return config


class FakeTriton(Backend, ModelIndex):
    """Triton that answers by rules: a text gives numbers, a vector is a text's length, a score the share of "x".

    `returned`: the num_return_sequences of the checkpoints of models that generate.
    """

    def __init__(self, slots: int = 4, step_s: float = 0.0, returned: int = 1) -> None:
        self.slots, self.step_s, self.returned = slots, step_s, returned
        self.may_answer: asyncio.Event | None = None  # requests that come while this is set wait for it
        self.said = ""  # of models that generate; empty: the rules' answers
        self.running = 0
        self.requests: list[dict[str, Any]] = []
        self.metadata: list[Metadata] = []
        self.index_s = 0.0
        self.up = True
        self.adapter_names = ["poems", "sql"]
        self.away: set[str] = set()  # models of its repository that are not ready

    async def ready(self) -> bool:
        return self.up

    async def index(self) -> list[tuple[str, str]]:
        await asyncio.sleep(self.index_s)
        ready = [*((name, "1") for name in MODELS), ("embeds_model", "1")]
        return [(name, version) for name, version in ready if name not in self.away]

    async def repository_models(self) -> set[str]:
        return {name for name, _ in await self.index()} | self.away

    async def config(self, name: str, version: str) -> model_config_pb2.ModelConfig:
        return config_of(name)

    async def hosted(self, front: str) -> str:
        raise ApiError(404, f"{front} is no shared front")

    async def adapters(self, model: ServedModel) -> list[str]:
        assert bool(model.batch) == (model.task != "text-generation")
        if ADAPTER not in MODELS[model.name][1]:
            raise ApiError(400, "'lora_name' is not an option of this model")
        return self.adapter_names

    async def infer(self, request: service_pb2.ModelInferRequest, metadata: Metadata = ()) -> dict[str, Output]:
        values = self._read(request, metadata)
        if self.may_answer is not None:
            await self.may_answer.wait()
        if "documents" in values:
            rows = values["documents"]
            scale = 9 if "function_to_apply" in values else 1  # raw
            scores = [[scale * text.count("x") / max(1, len(text)) for text in row] for row in rows]
            return _outputs(score=np.array(scores, np.float32), prompt_tokens=_lengths(rows))
        self._refuse_unknown([row[0] for row in values.get("lora_name", [])])
        texts = [row[0] for row in values["text_input"]]
        if any(not text.strip() for text in texts):
            raise ApiError(400, "text_input, row 0, is empty; send at least one character that is not a space")
        if "tokenize" in values:
            return _outputs(tokens=np.array([[_tokens([1, *map(ord, text)])] for text in texts], np.object_))
        counted = {"prompt_tokens": np.array([[len(text)] for text in texts], np.int32)}
        if request.model_name == "sparse":
            longest = max(map(len, texts))
            indices = [[*map(ord, text), *[-1] * (longest - len(text))] for text in texts]
            weights = np.where(np.array(indices) < 0, 0, 0.5).astype(np.float32)
            return _outputs(indices=np.array(indices, np.int32), values=weights, **counted)
        if request.model_name in ("topics", "moods"):
            labels = np.array([["a", "b"]] * len(texts), np.object_)
            two = [1.5, -0.5] if "function_to_apply" in values else [0.75, 0.25]
            if "lora_name" in values:  # whose adapter has labels of its own, the best one last
                own = np.array([["z", "y"]] * len(texts), np.object_)
                best, all_scores = (np.array([pair] * len(texts), np.float32) for pair in (two, two[::-1]))
                return _outputs(label=own, score=best, class_scores=all_scores, **counted)
            return _outputs(label=labels, score=np.array([two] * len(texts), np.float32), **counted)
        if request.model_name == "features":
            vectors = [[[ord(letter), 0, 0, 1] for letter in text] for text in texts]
            return _outputs(embedding=np.array(vectors, np.float32), **counted)
        last = [float("nan") if text == "not finite" else 1.0 for text in texts]
        return _outputs(
            embedding=np.array([[len(t), 3, 0, x] for t, x in zip(texts, last, strict=True)], np.float32), **counted
        )

    async def stream(
        self, request: service_pb2.ModelInferRequest, metadata: Metadata = ()
    ) -> AsyncGenerator[dict[str, Output], None]:
        values = self._read(request, metadata)
        if "tokenize" in values:
            yield _told(values)
            return
        self._refuse_unknown(values.get("lora_name", []))
        length, n = int(values.get("max_tokens", [8])[0]), int(values.get("n", [self.returned])[0])
        prompt = str(values.get("text_input", values.get("messages", values.get("input_ids", [""])))[0])
        if not prompt or not 1 <= length <= LONGEST:
            raise ApiError(400, f"max_tokens is {length}; after a prompt of 1 tokens it can be 1 to {LONGEST}")
        if self.running >= self.slots:
            raise ApiError(429, "4 sequences wait already and the limit is 4", code="queue_full", retry_after=1)
        texts, opened = [f"{step} " for step in range(length)], False
        if "guide" in values and "tools" in values:  # the text that a guide would allow, in two pieces
            texts = [CALL[:9], CALL[9:], *[""] * (length - 2)] if length > 1 else [CALL[:9]]
        elif "tools" in values or request.model_name == "thinks":  # without a request for it
            said = SPOKEN if "tools" in values else "It is not."
            opened = values.get("reasoning_effort") == ["high"]  # then a template begins the reasoning
            if request.model_name == "thinks":
                said = ("" if opened else "<think>\n") + f"{THOUGHT}\n</think>\n\n{said}"
            texts = [said[7 * step : 7 * step + 7] for step in range(length)]
        if self.said:
            texts = [self.said[step : step + 1] for step in range(length)]
        whole = not values.get("stream", [False])[0]
        asks = ("logprobs", "return_perf_metrics", "return_num_output_tokens")
        wanted: set[str] = {name for name in asks if name in values}
        self.running += 1
        may_answer = self.may_answer
        try:
            for step in range(length):
                if step and may_answer is not None:
                    await may_answer.wait()
                await asyncio.sleep(self.step_s)
                last = step == length - 1
                for index in range(0 if whole else n):
                    begins = _outputs(thinking=np.array([True])) if opened and not step else {}
                    yield {**_piece([texts[step]], [index], n, length if last else 0, len(prompt), wanted), **begins}
            if whole:
                text = "".join(texts)
                whole_answer = _piece([text] * n, list(range(n)), n, length, len(prompt), wanted)
                if "prompt_logprobs" in values:
                    first = '[{"token": 1, "text": "p", "logprob": null, "top": []}]'
                    whole_answer |= _outputs(prompt_logprobs_output=np.array([first], np.object_))
                yield {**whole_answer, **(_outputs(thinking=np.array([True])) if opened else {})}
        finally:
            self.running -= 1

    def _refuse_unknown(self, adapters: Sequence[str]) -> None:
        for adapter in adapters:
            if adapter not in self.adapter_names:
                known = ", ".join(self.adapter_names)
                raise ApiError(400, f"lora_name is {adapter!r}, which is not an adapter of this model; it has {known}")

    def _read(self, request: service_pb2.ModelInferRequest, metadata: Metadata) -> dict[str, Any]:
        """Return the inputs of a request; raise an error where Triton would."""
        fields = {field.name: field for field in MODELS[request.model_name][1]}
        values = {}
        for tensor, raw in zip(request.inputs, request.raw_input_contents, strict=True):
            assert tensor.name in fields, "the gateway sends what a model has"
            array = Output(tensor.datatype, tuple(tensor.shape), raw).array()  # of the size of its shape
            rows = array if MODELS[request.model_name][0] == "text-generation" else array[0]
            assert fields[tensor.name].dims in ((-1,), (len(rows),)), "of the shape that the configuration says"
            values[tensor.name] = array.tolist()
        missing = [name for name, field in fields.items() if not field.optional and name not in values]
        assert not missing
        self.requests.append(values)
        self.metadata.append(metadata)
        return values


def _told(values: dict[str, Any]) -> dict[str, Output]:
    """Return the text and the tokens of a prompt: characters after a special token of number 1."""
    prompt = values.get("text_input", values.get("messages", [""]))[0]
    ids = values.get("input_ids") or [1, *map(ord, prompt)]
    if not all(0 <= token < 128 for token in ids):
        raise ApiError(400, f"{ids[0]} is not a token id; this model has 0 to 127")
    shown = ids if not values.get("skip_special_tokens", [True])[0] else ids[ids[0] == 1 :]
    text = "".join("<s>" if one == 1 else chr(one) for one in shown)
    return _outputs(text_output=np.array([text], np.object_), tokens=np.array([_tokens(ids)], np.object_))


def _tokens(ids: Sequence[int]) -> str:
    begin = {"id": 1, "text": "<s>", "special": True, "start": None, "stop": None}
    letters = [one for one in ids if one != 1]
    tokens = [{"id": c, "text": chr(c), "special": False, "start": i, "stop": i + 1} for i, c in enumerate(letters)]
    return json.dumps([*[begin] * (ids[0] == 1), *tokens])


def _piece(
    texts: list[str], indices: list[int], n: int, ended: int, prompt: int, wanted: set[str]
) -> dict[str, Output]:
    outputs: dict[str, Any] = {"text_output": np.array(texts, np.object_)}
    if n > 1:
        outputs["index"] = np.array(indices, np.int32)
    if ended:
        outputs["finish_reason"] = np.array(["length"] * len(texts), np.object_)
        outputs["prompt_tokens"] = np.array([prompt], np.int32)
        outputs["completion_tokens"] = np.array([ended] * len(texts), np.int32)
        if "return_perf_metrics" in wanted:
            outputs["cached_tokens"] = np.array([prompt // 2], np.int32)
            outputs["queue_seconds"] = np.array([0.003], np.float32)
    if "return_num_output_tokens" in wanted:
        outputs["num_input_tokens"] = np.array([prompt], np.uint32)
        outputs["num_output_tokens"] = np.array([1] * len(texts), np.uint32)
    if "logprobs" in wanted:
        top = '{"token": 7, "text": "x", "logprob": null}'
        text = f'[{{"token": 3, "text": "a", "logprob": -0.5, "top": [{top}]}}]'
        outputs["logprobs_output"] = np.array([text] * len(texts), np.object_)
    return _outputs(**outputs)


def _lengths(rows: Sequence[Sequence[str]]) -> np.ndarray:
    return np.array([[sum(map(len, row))] for row in rows], np.int32)


def _outputs(**arrays: np.ndarray) -> dict[str, Output]:
    return {name: _output(array) for name, array in arrays.items()}


def _output(array: np.ndarray) -> Output:
    if array.dtype == np.object_:
        data = [text.encode() for text in array.ravel()]
        return Output("BYTES", array.shape, b"".join(LENGTH.pack(len(text)) + text for text in data))
    return Output(
        {"i": "INT32", "u": "UINT32", "f": "FP32", "b": "BOOL"}[array.dtype.kind], array.shape, array.tobytes()
    )
