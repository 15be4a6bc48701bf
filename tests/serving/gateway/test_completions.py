"""POST /v1/completions: prompts, echo and log-probabilities."""

from __future__ import annotations

from builder.serving.gateway.openai.completions import _logprobs as completion_logprobs
from tests.serving.gateway.fake_triton import FakeTriton
from tests.serving.gateway.requests import CHAT, fetch, gateway


def test_echo_includes_log_probabilities_of_the_prompt() -> None:
    body = {"prompt": "a", "max_tokens": 1, "logprobs": 1, "echo": True}
    logprobs = fetch("/v1/completions", {"model": "guided", **body}).json["choices"][0]["logprobs"]
    assert (logprobs["tokens"], logprobs["token_logprobs"]) == (["p", "a"], [None, -0.5])
    assert logprobs["top_logprobs"][0] is None
    assert fetch("/v1/completions", {"model": "writes", **body}).error["param"] == "echo"


def test_several_prompts_keep_their_order() -> None:
    body = {"model": "writes", "prompt": ["a", "bcd"], "max_tokens": 2, "n": 2}
    whole = fetch("/v1/completions", body).json
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2, 3]
    assert whole["usage"] == {
        "prompt_tokens": 4,
        "completion_tokens": 8,
        "total_tokens": 12,
        "prompt_tokens_details": {"cached_tokens": 1},
    }
    chunks = fetch("/v1/completions", {**body, "stream": True}).events[:-1]
    assert {chunk["choices"][0]["index"] for chunk in chunks} == {0, 1, 2, 3}


def test_completions_accept_token_ids() -> None:
    triton = FakeTriton()
    body = {"model": "guided", "max_tokens": 2}
    for prompt, sent in (([5, 6], [[5, 6]]), ([[5], [6, 7]], [[5], [6, 7]]), (["a", [5]], [[5]])):
        triton.requests.clear()
        answer = fetch("/v1/completions", {**body, "prompt": prompt}, gateway(triton))
        assert len(answer.json["choices"]) == len(triton.requests)
        assert [inputs["input_ids"] for inputs in triton.requests if "input_ids" in inputs] == sent
    prompts: tuple[object, ...] = ([], [[]], [5, "a"], [[5, "a"]], [True], [2**31], [""], 5)
    for wrong in prompts:
        assert fetch("/v1/completions", {**body, "prompt": wrong}).error["param"] in ("prompt", "input_ids"), wrong
    older = fetch("/v1/completions", {**body, "model": "writes", "prompt": [5]})
    assert "writes takes texts" in older.error["message"]


def test_text_offsets_continue_through_a_stream() -> None:
    """Regression: each chunk began at 0 again."""
    body = {"model": "writes", "prompt": "a", "max_tokens": 3, "n": 2, "logprobs": 0, "stream": True}
    *chunks, done = fetch("/v1/completions", body).events
    places = [
        [c["choices"][0]["logprobs"]["text_offset"] for c in chunks if c["choices"][0]["index"] == i] for i in (0, 1)
    ]
    assert places == [[[0], [1], [2]]] * 2
    assert done == "[DONE]"


def test_top_logprobs_keep_the_likeliest_of_equal_texts() -> None:
    """Regression: parts of characters are all spelled U+FFFD, and the reported probability was that of the last."""
    top = [{"token": token, "text": "\ufffd", "logprob": -float(token)} for token in (1, 2)]
    told = completion_logprobs([{"token": 1, "text": "a", "logprob": -1.0, "top": top}])
    assert told["top_logprobs"] == [{"\ufffd": -1.0, "a": -1.0}]


def test_completions_refuse_fields_of_chats() -> None:
    completion = {"model": "writes", "prompt": "a"}
    for name, value in (("top_logprobs", 2), ("messages", CHAT["messages"])):
        refused = fetch("/v1/completions", {**completion, name: value})
        assert (refused.status, refused.error["param"]) == (400, name)
    assert fetch("/v1/completions", {**completion, "top_logprobs": 0}).status == 200


def test_default_n_is_one() -> None:
    """Regression: with num_return_sequences in the checkpoint, the answers of several prompts ran into one another."""
    app = gateway(FakeTriton(returned=2))
    (choice,) = fetch("/v1/chat/completions", CHAT, app).json["choices"]
    assert choice["message"]["content"] == "0 1 2 "
    prompts = {"model": "writes", "prompt": ["a", "b"], "max_tokens": 2}
    assert [choice["text"] for choice in fetch("/v1/completions", prompts, app).json["choices"]] == ["0 1 "] * 2
    task = {"model": "writes", "inputs": ["a"], "parameters": {"max_tokens": 2}}
    assert fetch("/v1/tasks/text-generation", task, app).json[0]["generated_text"] == "0 1 "
