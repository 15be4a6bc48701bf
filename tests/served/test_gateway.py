"""Official clients against the gateway's process over a real Triton."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import anthropic
import cohere
import httpx
import numpy as np
import openai
import pytest
from openai.types.chat import (
    ChatCompletionFunctionToolParam,
    ChatCompletionMessageParam,
    ChatCompletionStreamOptionsParam,
)
from pydantic import BaseModel
from transformers import AutoTokenizer

from builder.serving.client.client import Client
from builder.serving.server.gateway import gateway
from builder.serving.server.triton import TritonServer, free_ports
from tests.served.counts import counts
from tests.served.statistics import TRIES

Connect = Callable[[str], Client]
CHAT: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Where is the museum?"}]
PAST_ENDS = {"ignore_eos": True}


@pytest.fixture(scope="module")
def url(server: TritonServer) -> Iterator[str]:
    port = free_ports().http
    with gateway(server.url, "127.0.0.1", port):
        yield f"http://127.0.0.1:{port}"


@pytest.fixture
def api(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as api:
        yield api


def test_models_describe_themselves(api: openai.OpenAI) -> None:
    models = {model.id: model.model_extra or {} for model in api.models.list()}
    assert {"writes", "topics", "minilm_fp32", "speaks"} <= set(models)
    assert not any(name.endswith("_model") for name in models), "engines are not for clients"
    assert (models["writes"]["max_model_len"], models["writes"]["chat"]) == (128, True)
    assert models["topics"]["labels"] == ["sport", "food", "travel"]
    assert {"en_XX", "ro_RO"} <= set(models["speaks"]["languages"])
    assert models["minilm_fp32"]["max_model_len"] == 256


def test_embeddings_equal_the_model_outputs(api: openai.OpenAI, client: Connect) -> None:
    texts = ["How do I renew my passport?", "The soup needs salt."] * 20
    answer = api.embeddings.create(model="minilm_fp32", input=texts)  # the client asks for base64
    floats = api.embeddings.create(model="minilm_fp32", input=texts[:2], encoding_format="float")
    for text, packed, plain in zip(texts, answer.data, floats.data, strict=False):
        expected = client("minilm_fp32").ask({"text_input": text})
        np.testing.assert_allclose(packed.embedding, expected["embedding"], atol=1e-5)
        np.testing.assert_allclose(plain.embedding, packed.embedding, atol=1e-5)
    counted = sum(client("minilm_fp32").ask({"text_input": text})["prompt_tokens"] for text in texts[:2])
    assert answer.usage.prompt_tokens == 20 * counted


def test_chat_equals_the_model_output_whole_and_streamed(api: openai.OpenAI, client: Connect) -> None:
    expected = client("writes").ask({"messages": json.dumps(CHAT), "max_tokens": 12, "temperature": 0.0, **PAST_ENDS})
    options: dict[str, Any] = {
        "model": "writes",
        "messages": CHAT,
        "max_tokens": 12,
        "temperature": 0,
        "extra_body": PAST_ENDS,
    }
    whole = api.chat.completions.create(**options)
    assert whole.choices[0].message.content == "".join(expected["text_output"])
    assert whole.choices[0].finish_reason == "length"
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (expected["prompt_tokens"], 12)
    usage: ChatCompletionStreamOptionsParam = {"include_usage": True}
    chunks = list(api.chat.completions.create(**options, stream=True, stream_options=usage))
    assert "".join(c.choices[0].delta.content for c in chunks if c.choices) == whole.choices[0].message.content
    assert len(chunks) > 5
    assert chunks[-1].usage == whole.usage


def test_chat_responses_and_messages_apis_give_the_same_answer(api: openai.OpenAI, url: str) -> None:
    greedy: dict[str, Any] = {"temperature": 0, **PAST_ENDS}
    chat: Any = api.chat.completions.create(model="writes", messages=CHAT, max_tokens=12, extra_body=greedy)
    options: dict[str, Any] = {"model": "writes", "input": "Where is the museum?", "max_output_tokens": 12}
    response: Any = api.responses.create(**options, extra_body=greedy)
    assert response.output_text == chat.choices[0].message.content
    assert (response.status, response.usage.total_tokens) == ("incomplete", chat.usage.total_tokens)
    *_, last = api.responses.create(**options, stream=True, extra_body=greedy)
    assert last.response.output_text == response.output_text
    conversation: Any = {"model": "writes", "messages": CHAT}
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        with client.messages.stream(**conversation, max_tokens=12, extra_body=greedy) as stream:
            message: Any = stream.get_final_message()
        assert message.content[0].text == response.output_text
        counted = client.messages.count_tokens(**conversation).input_tokens
        assert counted == chat.usage.prompt_tokens == message.usage.input_tokens + message.usage.cache_read_input_tokens
        continued = client.messages.create(
            model="writes",
            messages=[{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "The museum"}],
            max_tokens=4,
            extra_body=greedy,
        )
        assert continued.content


def test_sampling_options_reach_the_model(api: openai.OpenAI) -> None:
    options: dict[str, Any] = {
        "model": "writes",
        "prompt": "The film",
        "max_tokens": 8,
        "n": 2,
        "seed": 5,
        "logprobs": 2,
    }
    first = api.completions.create(**options, extra_body=PAST_ENDS)
    again = api.completions.create(**options, extra_body=PAST_ENDS)
    assert [choice.text for choice in first.choices] == [choice.text for choice in again.choices]
    assert first.choices[0].text != first.choices[1].text
    assert len(first.choices[0].logprobs.token_logprobs) == first.usage.completion_tokens / 2 == 8


def test_stop_logit_bias_and_logprobs(api: openai.OpenAI) -> None:
    greedy: dict[str, Any] = {"model": "writes", "messages": CHAT, "temperature": 0, "extra_body": PAST_ENDS}
    whole = api.chat.completions.create(**greedy, max_tokens=20, logprobs=True, top_logprobs=3)
    tokens = whole.choices[0].logprobs.content
    assert len(tokens) == 20
    assert all(token.logprob == token.top_logprobs[0].logprob <= 0 for token in tokens), "greedy takes the best"
    text = whole.choices[0].message.content
    cut = api.chat.completions.create(**greedy, max_tokens=20, stop=text[3:6])
    assert cut.choices[0].message.content == text[: text.find(text[3:6])]
    assert cut.choices[0].finish_reason == "stop"
    forced = api.chat.completions.create(**greedy, max_tokens=3, logit_bias={"42": 100})
    once = api.chat.completions.create(**greedy, max_tokens=1, logit_bias={"42": 100})
    assert forced.choices[0].message.content == 3 * once.choices[0].message.content


class Opening(BaseModel):
    open: bool
    day: Literal["Friday", "Sunday"]


def test_response_format_yields_a_valid_document(api: openai.OpenAI) -> None:
    answer = api.chat.completions.parse(model="writes", messages=CHAT, response_format=Opening)
    assert isinstance(answer.choices[0].message.parsed, Opening)


def test_echo_returns_log_probabilities_of_the_prompt(api: openai.OpenAI) -> None:
    options: dict[str, Any] = {
        "model": "writes",
        "prompt": "The film starts",
        "max_tokens": 1,
        "temperature": 0,
        "logprobs": 1,
    }
    answer = api.completions.create(**options, echo=True)
    logprobs = answer.choices[0].logprobs
    assert len(logprobs.tokens) == answer.usage.total_tokens
    assert logprobs.token_logprobs[0] is None
    assert all(value < 0 for value in logprobs.token_logprobs[1:])


def test_token_id_prompts_and_cached_tokens(api: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "writes", "max_tokens": 4, "temperature": 0, "extra_body": PAST_ENDS}
    prompt = list(range(20, 44))
    first = api.completions.create(**options, prompt=[prompt, [30]])
    assert [len(first.choices), first.usage.prompt_tokens] == [2, 25]
    again = api.completions.create(**options, prompt=prompt)
    assert again.choices[0].text == first.choices[0].text
    assert again.usage.prompt_tokens_details.cached_tokens == 23


def test_model_with_a_batch_dimension_completes(api: openai.OpenAI, client: Connect) -> None:
    expected = client("writes_one").ask({"text_input": "The", "max_tokens": 6, "temperature": 0.0, **PAST_ENDS})
    options: dict[str, Any] = {
        "model": "writes_one",
        "prompt": "The",
        "max_tokens": 6,
        "temperature": 0,
        "extra_body": PAST_ENDS,
    }
    whole = api.completions.create(**options, stop="never said", logprobs=1)
    assert whole.choices[0].text == expected["text_output"][0]
    chunks = api.completions.create(**options, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text


@pytest.mark.parametrize("name", ["topics", "names_bpe", "writes"])
def test_tokenize_equals_the_checkpoint_tokenizer(url: str, checkpoint: Callable[[str], Path], name: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(checkpoint(name))
    texts = ["The museum opens on Friday.", "Zürich, 12 é"]
    listed = httpx.post(f"{url}/tokenize", json={"model": name, "inputs": texts}).json()
    assert [[token["id"] for token in tokens] for tokens in listed] == tokenizer(texts)["input_ids"]
    bare = {"model": name, "prompt": texts[1], "add_special_tokens": False, "return_token_strs": True}
    without = httpx.post(f"{url}/tokenize", json=bare).json()
    assert without["tokens"] == tokenizer(texts[1], add_special_tokens=False)["input_ids"]
    for text, tokens in zip(texts, listed, strict=True):
        for token in tokens:
            assert token["special"] == (token["start"] is None)
            assert token["special"] or token["text"] == text[token["start"] : token["stop"]]


def test_tokenize_chat_and_detokenize(url: str, api: openai.OpenAI) -> None:
    tokenised = httpx.post(f"{url}/tokenize", json={"model": "writes", "messages": CHAT}).json()
    answer = api.chat.completions.create(model="writes", messages=CHAT, max_tokens=1)
    assert answer.usage is not None
    assert (tokenised["count"], tokenised["max_model_len"]) == (answer.usage.prompt_tokens, 128)
    text = httpx.post(f"{url}/detokenize", json={"model": "writes", "tokens": tokenised["tokens"]}).json()["prompt"]
    assert str(CHAT[0]["content"]) in text
    long = httpx.post(f"{url}/tokenize", json={"model": "writes", "prompt": "and so on " * 200}).json()
    assert long["count"] > 128, "how long a text is can be asked of one that is too long"
    decoded = httpx.post(f"{url}/decode", json={"model": "writes", "ids": long["tokens"][:9]}).json()
    assert decoded[0].startswith("and so")


def test_concurrent_streams_equal_single_ones(url: str) -> None:
    async def run() -> tuple[list[str], list[str]]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as api:

            async def streamed(index: int) -> str:
                chunks = await api.completions.create(
                    model="writes", prompt="The" + " and" * index, max_tokens=9 + index, temperature=0, stream=True
                )
                return "".join([chunk.choices[0].text async for chunk in chunks])

            alone = [await streamed(index) for index in range(12)]
            return alone, await asyncio.gather(*map(streamed, range(12)))

    alone, together = asyncio.run(run())
    assert together == alone


def test_errors_match_the_openai_client(api: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="available models: "):
        api.completions.create(model="other", prompt="a")
    with pytest.raises(openai.BadRequestError, match="max_tokens is 5000") as refused:
        api.completions.create(model="writes", prompt="a", max_tokens=5000)
    assert refused.value.param == "max_tokens"
    tool: ChatCompletionFunctionToolParam = {"type": "function", "function": {"name": "a"}}
    with pytest.raises(openai.BadRequestError, match="writes cannot choose whether to call a tool"):
        api.chat.completions.create(model="writes", messages=CHAT, tools=[tool])
    with pytest.raises(openai.BadRequestError, match="the limit of this model is 256"):
        api.embeddings.create(model="minilm_fp32", input="word " * 400)


def test_full_queue_is_a_rate_limit_error(url: str) -> None:
    """Send ten requests at once to a model with one slot and a queue of two."""

    async def run() -> set[str]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as api:

            async def ask() -> str:
                try:
                    await api.completions.create(model="writes_one", prompt="The", max_tokens=200, extra_body=PAST_ENDS)
                except openai.RateLimitError as error:
                    return f"refused, {error.response.headers['retry-after']}"
                return "answered"

            return {*await asyncio.gather(*(ask() for _ in range(10)))}

    seen = [asyncio.run(run())]
    while len(seen) < TRIES and seen[-1] == {"answered"}:
        seen.append(asyncio.run(run()))
    assert seen[-1] == {"answered", "refused, 1"}


def test_disconnected_client_frees_its_slot(server: TritonServer, api: openai.OpenAI) -> None:
    """The only slot is freed before the long answer is complete.

    On a busy machine some answers may complete before their client disconnects, but not all.
    """
    assert any(_generated_until_disconnect(server, api, 250) < 250 for _ in range(5 * TRIES))


def _generated_until_disconnect(server: TritonServer, api: openai.OpenAI, length: int) -> float:
    """Return the tokens that the slot generates when a client disconnects after the first of `length`."""
    before = _generated(server, api)
    stream = api.completions.create(
        model="writes_one", prompt="The", max_tokens=length, stream=True, extra_body=PAST_ENDS
    )
    next(iter(stream))
    stream.close()
    return _generated(server, api) - before


def _generated(server: TritonServer, api: openai.OpenAI) -> float:
    """Return the number of tokens generated so far; answer one more request to have it published."""
    requests, end = counts(server, "writes_one")["requests_total"], time.monotonic() + 300
    assert api.completions.create(model="writes_one", prompt="The", max_tokens=1).usage
    while (now := counts(server, "writes_one"))["requests_total"] == requests:
        assert time.monotonic() < end, "it publishes nothing"
        time.sleep(0.05)
    return now["generated_tokens_total"]


def test_cohere_reranks(url: str, client: Connect) -> None:
    documents = ["Passports are renewed at the town hall.", "The soup needs salt.", "a"]
    expected = client("ranks").ask({"query": "passport", "documents": documents})
    with httpx.Client() as connection:
        api = cohere.ClientV2("none", base_url=url, httpx_client=connection)
        answer = api.rerank(model="ranks", query="passport", documents=documents, top_n=2)
    assert [result.index for result in answer.results] == expected["order"][:2]
    scores = [expected["score"][index] for index in expected["order"][:2]]
    assert [result.relevance_score for result in answer.results] == pytest.approx(scores, abs=1e-5)


@pytest.mark.filterwarnings("ignore::DeprecationWarning:cohere.*")  # from pydantic
def test_cohere_embeds(url: str, client: Connect) -> None:
    texts = ["How do I renew my passport?", "The soup needs salt."]
    expected = np.array([client("minilm_fp32").ask({"text_input": text})["embedding"] for text in texts])
    types = ["float", "int8", "uint8", "binary", "ubinary"]
    with httpx.Client() as connection:
        options: dict[str, Any] = {"model": "minilm_fp32", "texts": texts, "input_type": "search_document"}
        second = cohere.ClientV2("none", base_url=url, httpx_client=connection).embed(**options, embedding_types=types)
        first = cohere.Client("none", base_url=url, httpx_client=connection)
        plain, typed = first.embed(**options), first.embed(**options, embedding_types=types, truncate="END")
    assert plain.response_type == "embeddings_floats"
    assert plain.texts == texts
    np.testing.assert_allclose(plain.embeddings, expected, atol=1e-5)
    for answer in (typed, second):
        by_type: Any = answer.embeddings
        np.testing.assert_allclose(by_type.float_, expected, atol=1e-5)
        assert np.shape(by_type.binary) == np.shape(by_type.ubinary) == (2, 48)
        np.testing.assert_array_equal(np.unpackbits(np.array(by_type.ubinary, np.uint8), axis=1), expected > 0)
        for row, vector in zip(np.array(by_type.int8), expected, strict=True):
            assert row @ vector / np.linalg.norm(row) / np.linalg.norm(vector) > 0.99
        np.testing.assert_array_equal(np.array(by_type.uint8) - 128, by_type.int8)
    assert second.meta is not None
    assert second.meta.billed_units is not None


def test_tasks_equal_the_model_outputs(url: str, client: Connect) -> None:
    def post(path: str, body: object) -> Any:
        request = urllib.request.Request(url + path, json.dumps(body).encode(), {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=300) as response:
            return json.load(response)

    answer = post("/v1/tasks/question-answering", {"inputs": {"question": "Who?", "context": "Ada lives in London"}})
    expected = client("answers").ask({"question": "Who?", "context": "Ada lives in London"})
    assert answer["answer"] == expected["answer"]
    spoken = post("/v1/tasks/translation", {"inputs": ["The film", "A"], "parameters": {"target_language": "ro_RO"}})
    expected = client("speaks").ask({"text_input": "The film", "target_language": "ro_RO"})
    assert spoken[0]["translation_text"] == "".join(expected["text_output"])


def test_running_gauge_returns_to_zero(url: str, api: openai.OpenAI) -> None:
    """Regression: a scrape counted itself as a running request without a model."""
    api.completions.create(model="writes", prompt="The", max_tokens=1)
    line, end = 'vllm:num_requests_running{engine="0",model_name="writes"} 0.0', time.monotonic() + 60
    while line not in (text := httpx.get(f"{url}/metrics").text.splitlines()):  # the gauge is updated after the answer
        assert time.monotonic() < end, text


def test_stopping_gateway_finishes_running_requests(server: TritonServer) -> None:
    port = free_ports().http
    pieces: list[str] = []

    def read(process: subprocess.Popen[bytes]) -> None:
        with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none") as api:
            options: dict[str, Any] = {"model": "writes", "prompt": "The", "max_tokens": 120, "extra_body": PAST_ENDS}
            for number, chunk in enumerate(api.completions.create(**options, stream=True)):
                pieces.append(chunk.choices[0].finish_reason)
                if number == 0:
                    process.send_signal(signal.SIGTERM)

    with gateway(server.url, "127.0.0.1", port) as process:
        reader = threading.Thread(target=read, args=(process,))
        reader.start()
        reader.join(300)
        assert process.wait(300) == 0
    assert pieces[-1] == "length"
