"""Log-probabilities of prompt tokens equal PyTorch's, beside any rows and with any cache."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from builder.building.verify.generation import geometry_of
from builder.graphs.export.decoder import export_decoder
from builder.runtime.contract import Session, dump
from builder.runtime.fields import InputError
from builder.runtime.generation import responses
from builder.runtime.generation import service as service_module
from builder.runtime.generation.calls import MAX_SCORED_TOKENS
from builder.runtime.generation.decode_loop import DecodeLoop
from builder.runtime.generation.executors.onnxruntime import InProcess
from builder.runtime.generation.options import COMMON, PROMPT
from builder.runtime.generation.responses import Answer
from builder.runtime.generation.scheduler import SchedulerLimits
from builder.runtime.generation.service import Service
from builder.runtime.panics import TokenizerError
from tests.decoders import make_decoder
from tests.generation.asked import Asked
from tests.generation.executors import SumExecutor
from tests.graphs.test_decoders import prompts
from tests.servings import answered, decoder_serving
from tests.tiny_encoders import VOCABULARY


def scored(prompt: list[int], count: int = 3, wanted: int = 2, **options: Any) -> Asked:
    request = Asked(prompt, count, prompt_logprobs=wanted, **options)
    request.request.scores = []
    return request


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "gemma2"])
def test_prompt_logprobs_equal_pytorchs(model_type: str, tmp_path: Path) -> None:
    """Prompts shorter and longer than a chunk, beside others without log-probabilities, and again with a full cache."""
    model = make_decoder(model_type)
    exported = export_decoder(model, tmp_path, 128)
    executor = InProcess(exported.graph.path, geometry_of(exported.caches, 4, 128, VOCABULARY), Session(threads=1))
    loop = DecodeLoop(executor, SchedulerLimits(100, 16))
    mates = [Asked(prompt, 20) for prompt in prompts()]
    wanted = [scored(prompt, n=1 + number % 2) for number, prompt in enumerate([*prompts(), prompts()[1]])]
    for mate, one in zip([*mates, mates[0]], wanted, strict=True):
        loop.submit(mate.sequences) if not mate.pieces else None
        loop.submit(one.sequences)
        loop.step()
    loop.run_until_idle()
    assert loop.stats.reused_tokens, "sequences after the first of a request need not read its prompt again"
    for one in wanted:
        tokens = one.request.prompt
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, :-1].double()
        known = torch.log_softmax(logits, dim=-1)
        scores = one.request.scores
        assert scores is not None
        assert [choice.token for choice in scores] == tokens[1:]
        logprobs = [choice.logprob for choice in scores if choice.logprob is not None]
        np.testing.assert_allclose(logprobs, known.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0], atol=2e-4)
        best = known.topk(2).values
        np.testing.assert_allclose([[v for _, v in choice.top] for choice in scores], best, atol=2e-4)


def test_scored_prompt_runs_in_chunks_without_the_cache() -> None:
    executor = SumExecutor(slots=2, max_length=400)
    loop = DecodeLoop(executor, SchedulerLimits(10, prefill_tokens=300))
    prompt = np.random.default_rng(0).integers(0, 50, 200).tolist()
    before, one, after = Asked(prompt, 2), scored(prompt), Asked(prompt, 2)
    for request in (before, one, after):
        loop.submit(request.sequences)
        loop.run_until_idle()
    assert one.tokens[:2] == before.tokens == after.tokens
    assert [new for _, _, new in executor.calls if new > 1] == [
        200,
        *[MAX_SCORED_TOKENS] * 3,
        200 - 3 * MAX_SCORED_TOKENS,
    ]
    assert loop.stats.reused_tokens == 199, "of the third, which wants no log-probabilities"
    assert len(one.request.scores or ()) == 199


def test_failed_scoring_fails_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = DecodeLoop(SumExecutor(), SchedulerLimits(10, 8))
    bad, good = scored([1, 2, 49, 3]), scored([4, 5])

    def failing(start: int, logits: np.ndarray) -> None:
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr(bad.request, "score", failing)
    for one in (bad, good):
        loop.submit(one.sequences)
    loop.run_until_idle()
    assert isinstance(bad.errors[0], ZeroDivisionError)
    assert good.request.scores
    assert not good.errors
    assert loop.cache.free_slots == 4


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Service:
    """Return a service whose model is a SumExecutor, and whose tokens are single letters."""
    letters = {chr(ord("A") + number): number for number in range(50)}
    tokenizer = Tokenizer(models.WordLevel(letters, unk_token="A"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    fields = [field.name for field in (*COMMON, *PROMPT)]
    serving = decoder_serving(fields=fields, defaults={"temperature": 0.0}, prefix_cache=True)
    (tmp_path / "serving.json").write_text(dump(serving))
    monkeypatch.setattr(service_module, "make_executor", lambda *arguments: SumExecutor(4, 64))
    return Service(tmp_path)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("n", [1, 2])
def test_prompt_logprobs_are_sent_once(small: Service, stream: bool, n: int) -> None:
    text = {"text_input": np.array([b"BCD"], object)}
    answers = answers_of(small, text, n=n, stream=stream, prompt_logprobs=1)
    assert [("prompt_logprobs_output" in answer) for answer in answers] == [True, *[False] * (len(answers) - 1)]
    (document,) = answers[0]["prompt_logprobs_output"]
    first, *others = json.loads(document)
    assert first == {"token": 1, "text": "B", "logprob": None, "top": []}
    assert [entry["text"] for entry in others] == ["C", "D"]
    assert all(entry["logprob"] < 0 and len(entry["top"]) == 1 for entry in others)


def answers_of(
    small: Service, tensors: Mapping[str, np.ndarray] | None = None, **parameters: Any
) -> list[dict[str, np.ndarray]]:
    answers: list[Answer] = []
    small.submit(tensors or {}, {"max_tokens": 3, **parameters}, lambda answer, last: answers.append(answer))
    small.loop.run_until_idle()
    return [answered(answer) for answer in answers]


def test_prompt_of_tokens_equals_the_prompt_of_its_text(small: Service) -> None:
    (text,), (ids,) = answers_of(small, text_input="BCD", echo=True), answers_of(small, input_ids=[1, 2, 3], echo=True)
    assert ids["text_output"].tolist() == text["text_output"].tolist()
    assert ids["prompt_tokens"].tolist() == [3]
    for wrong in ([50], [-1], [3, 1 << 20]):
        with pytest.raises(InputError, match="is not a token id; this model has 0 to 49"):
            answers_of(small, input_ids=wrong)
    with pytest.raises(InputError, match="the prompt has 64 tokens"):
        answers_of(small, input_ids=[1] * 64)


@pytest.mark.parametrize("stream", [True, False])
def test_perf_metrics_are_sent_on_request(small: Service, stream: bool) -> None:
    plain = answers_of(small, text_input="BCDEF", stream=stream)[-1]
    assert not {"cached_tokens", "queue_seconds", "num_input_tokens"} & set(plain), "the same request, the same answer"
    answers = answers_of(
        small, text_input="BCDEF", stream=stream, return_perf_metrics=True, return_num_output_tokens=True
    )
    assert all("cached_tokens" not in answer for answer in answers[:-1])
    last = answers[-1]
    assert last["cached_tokens"].tolist() == [4], "all but the token whose logits are wanted"
    assert 0 <= last["queue_seconds"][0] < 600
    assert {answer["num_input_tokens"].item() for answer in answers} == {5}
    assert [answer["num_output_tokens"].item() for answer in answers] == ([1, 1, 1] if stream else [3])
    assert last["num_input_tokens"].dtype == np.uint32


@pytest.mark.parametrize("stream", [True, False])
def test_decode_loop_defers_the_writing_of_answers(small: Service, stream: bool) -> None:
    """Deferred answers are written in order, and equal those written immediately."""
    asked: dict[str, Any] = {"max_tokens": 5, "logprobs": 2, "prompt_logprobs": 1, "n": 2, "stream": stream}
    at_once = answers_of(small, text_input="BCD", **asked)
    answers: list[tuple[Answer, bool]] = []
    left: list[Callable[[], None]] = []
    text = {"text_input": np.array([b"BCD"], object)}
    small.start(small.prepare(text, asked, lambda *answer: answers.append(answer), left.append))
    small.loop.run_until_idle()
    assert not answers
    for work in left:
        work()
    assert [last for _, last in answers] == [False] * (len(at_once) - 1) + [True]
    for (answer, _), wanted in zip(answers, at_once, strict=True):
        assert {name: values.tolist() for name, values in answered(answer).items()} == {
            name: values.tolist() for name, values in wanted.items()
        }


@pytest.mark.parametrize("later", [True, False])
def test_answer_that_cannot_be_written_gets_one_error(
    small: Service, later: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One token has no spelling: only the text before it is sent, and other requests are answered."""
    spelled = itertools.count()
    write = responses._logprobs

    def broken(*arguments: Any) -> str:
        if next(spelled) == 2:
            raise TokenizerError("no such token")
        return write(*arguments)

    monkeypatch.setattr(responses, "_logprobs", broken)
    answers: list[tuple[Answer, bool]] = []
    left: list[Callable[[], None]] = []
    text = {"text_input": np.array([b"BCD"], object)}
    asked: dict[str, Any] = {"max_tokens": 6, "logprobs": 0, "stream": True}
    one = small.prepare(text, asked, lambda *answer: answers.append(answer), *([left.append] if later else []))
    small.start(one)
    other = answers_of(small, text_input="CD")
    for work in left:  # which grows
        work()
    assert [isinstance(answer, Exception) for answer, _ in answers] == [False, False, True]
    assert [last for _, last in answers] == [False, False, True]
    assert str(answers[-1][0]) == "no such token"
    assert small.loop.stats.failures == 1
    assert other[0]["completion_tokens"].tolist() == [3]
    assert not small.loop.scheduler.has_unfinished
