"""Log-probabilities of a prompt's own tokens: those of PyTorch, whoever runs beside it and whatever is cached."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from builder.export.decoder import export_decoder
from builder.runtime.contract import Session, dump
from builder.runtime.generation import service as service_module
from builder.runtime.generation.engine import Engine
from builder.runtime.generation.executors.in_process import InProcess
from builder.runtime.generation.scheduler import SCORED_TOKENS, Limits
from builder.runtime.generation.service import Service
from builder.verify.generation import geometry_of
from tests.checkpoints import VOCABULARY
from tests.decoders import make_decoder
from tests.export.test_decoders import prompts
from tests.generation.executors import SumExecutor
from tests.generation.test_engine import Asked
from tests.servings import decoder_serving


def scored(prompt: list[int], count: int = 3, wanted: int = 2, **options: Any) -> Asked:
    asked = Asked(prompt, count, prompt_logprobs=wanted, **options)
    asked.request.scores = []
    return asked


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "gemma2"])
def test_they_are_pytorchs(model_type: str, tmp_path: Path) -> None:
    """Prompts shorter and longer than a piece, beside others that want none, and again where all is in the cache."""
    model = make_decoder(model_type)
    exported = export_decoder(model, tmp_path, 128)
    executor = InProcess(exported.graph.path, geometry_of(exported.caches, 4, 128, VOCABULARY), Session(threads=1))
    engine = Engine(executor, Limits(100, 16))
    mates = [Asked(prompt, 20) for prompt in prompts()]
    wanted = [scored(prompt, n=1 + number % 2) for number, prompt in enumerate([*prompts(), prompts()[1]])]
    for mate, one in zip([*mates, mates[0]], wanted, strict=True):
        engine.submit(mate.sequences) if not mate.pieces else None
        engine.submit(one.sequences)
        engine.step()
    engine.run_until_idle()
    assert engine.stats.reused_tokens, "sequences after the first of a request need not read its prompt again"
    for one in wanted:
        tokens = one.request.prompt
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, :-1].double()
        known = torch.log_softmax(logits, dim=-1)
        scores = one.request.scores
        assert scores is not None
        assert [choice.token for choice in scores] == tokens[1:]
        found = [choice.logprob for choice in scores]
        np.testing.assert_allclose(found, known.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0], atol=2e-4)
        best = known.topk(2).values
        np.testing.assert_allclose([[v for _, v in choice.top] for choice in scores], best, atol=2e-4)


def test_a_long_prompt_comes_in_pieces_and_nothing_of_it_from_the_cache() -> None:
    executor = SumExecutor(slots=2, max_length=400)
    engine = Engine(executor, Limits(10, prefill_tokens=300))
    prompt = np.random.default_rng(0).integers(0, 50, 200).tolist()
    before, one, after = Asked(prompt, 2), scored(prompt), Asked(prompt, 2)
    for asked in (before, one, after):
        engine.submit(asked.sequences)
        engine.run_until_idle()
    assert one.tokens[:2] == before.tokens == after.tokens
    assert [new for _, _, new in executor.calls if new > 1] == [200, *[SCORED_TOKENS] * 3, 200 - 3 * SCORED_TOKENS]
    assert engine.stats.reused_tokens == 199, "of the third, which wants no log-probabilities"
    assert len(one.request.scores or ()) == 199


def test_what_fails_for_one_prompt_fails_for_it_alone() -> None:
    engine = Engine(SumExecutor(), Limits(10, 8))
    bad, good = scored([1, 2, 49, 3]), scored([4, 5])
    bad.request.score = lambda *given: 1 / 0  # type: ignore[method-assign, assignment, return-value]
    for one in (bad, good):
        engine.submit(one.sequences)
    engine.run_until_idle()
    assert isinstance(bad.errors[0], ZeroDivisionError)
    assert good.request.scores
    assert not good.errors
    assert engine.cache.free == 4


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Service:
    """A service whose model is a SumExecutor, and whose tokens are single letters."""
    letters = {chr(ord("A") + number): number for number in range(50)}
    tokenizer = Tokenizer(models.WordLevel(letters, unk_token="A"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    fields = ("text_input", "max_tokens", "n", "stream", "prompt_logprobs", "temperature")
    (tmp_path / "serving.json").write_text(dump(decoder_serving(fields=fields, defaults={"temperature": 0.0})))
    monkeypatch.setattr(service_module, "make_executor", lambda *given: SumExecutor(4, 64))
    return Service(tmp_path)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("n", [1, 2])
def test_the_answer_says_them_once(small: Service, stream: bool, n: int) -> None:
    answers: list[dict[str, np.ndarray]] = []
    parameters = {"max_tokens": 3, "n": n, "stream": stream, "prompt_logprobs": 1}
    text = {"text_input": np.array([b"BCD"], object)}
    small.submit(text, parameters, lambda answer, last: answers.append(answer))  # type: ignore[arg-type]
    small.engine.run_until_idle()
    assert [("prompt_logprobs_output" in answer) for answer in answers] == [True, *[False] * (len(answers) - 1)]
    (said,) = answers[0]["prompt_logprobs_output"]
    first, *others = json.loads(said)
    assert first == {"token": 1, "text": "B", "logprob": None, "top": []}
    assert [entry["text"] for entry in others] == ["C", "D"]
    assert all(entry["logprob"] < 0 and len(entry["top"]) == 1 for entry in others)
