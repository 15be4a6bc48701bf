"""A decoder's text against PyTorch: a run over the whole text must rank each token first."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from builder.building.verify.generation import (
    EXACT,
    GENERATED_TOKENS,
    NEW_TOKENS,
    DecoderAgreement,
    DecoderReference,
    greedy_tokens,
    make_reference,
    measure,
    refuse_wrong_probabilities,
    refuse_wrong_text,
)
from builder.common.errors import VerificationError
from builder.runtime.contract import LayerShape
from builder.runtime.generation.executors.base import Executor, Geometry, last_of_rows
from tests.decoders import make_decoder
from tests.graphs.test_decoders import prompts
from tests.tiny_encoders import VOCABULARY

CACHES = [LayerShape(1, 1)]  # of an executor that has none


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return make_decoder("llama")


@pytest.fixture(scope="module")
def reference(model: PreTrainedModel) -> DecoderReference:
    return make_reference(model, prompts())


@pytest.fixture(scope="module")
def right(model: PreTrainedModel, reference: DecoderReference) -> DecoderAgreement:
    """Return the agreement of a graph that gives the text of transformers' generate."""
    texts = tuple(tuple(greedy_tokens(model, prompt, NEW_TOKENS)) for prompt in reference.prompts)
    return DecoderAgreement(0.0, 1.0, 1.0, reference.perplexity, texts, texts[:1])


def test_decoder_text_of_generate_is_accepted(
    model: PreTrainedModel, reference: DecoderReference, right: DecoderAgreement
) -> None:
    assert reference.generated == right.greedy[0][:GENERATED_TOKENS]
    refuse_wrong_text(model, reference, right)


@pytest.mark.parametrize(("number", "position"), [(0, 0), (3, 7), (5, NEW_TOKENS - 1)])
def test_decoder_text_with_one_wrong_token_is_refused(
    model: PreTrainedModel, reference: DecoderReference, right: DecoderAgreement, number: int, position: int
) -> None:
    texts = [list(text) for text in right.greedy]
    expected = texts[number][position]
    texts[number][position] = expected ^ 1
    with pytest.raises(
        VerificationError, match=rf"greedy token {position + 1} of the fused graph is {expected ^ 1}, .* "
    ):
        refuse_wrong_text(model, reference, replace(right, greedy=tuple(map(tuple, texts))))


def test_decoder_whose_generate_differs_from_forward_is_refused(
    model: PreTrainedModel, reference: DecoderReference, right: DecoderAgreement
) -> None:
    """The graph agrees with the forward pass, but transformers' generate gives another text."""
    other = (*reference.generated[:-1], reference.generated[-1] ^ 1)
    with pytest.raises(VerificationError, match=rf"greedy token {GENERATED_TOKENS} of transformers' generate is "):
        refuse_wrong_text(model, replace(reference, generated=other), right)


def test_decoder_text_wrong_only_alone_is_refused(
    model: PreTrainedModel, reference: DecoderReference, right: DecoderAgreement
) -> None:
    text = (right.alone[0][0] ^ 1, *right.alone[0][1:])
    with pytest.raises(VerificationError, match="greedy token 1 of the fused graph alone is "):
        refuse_wrong_text(model, reference, replace(right, alone=(text,)))


@pytest.mark.parametrize("length", [0, GENERATED_TOKENS - 1])
def test_decoder_text_that_ends_early_is_refused(
    model: PreTrainedModel, reference: DecoderReference, right: DecoderAgreement, length: int
) -> None:
    texts = (*right.greedy[:3], right.greedy[3][:length], *right.greedy[4:])
    with pytest.raises(VerificationError, match=rf"the fused graph wrote {length} tokens instead of {NEW_TOKENS}"):
        refuse_wrong_text(model, reference, replace(right, greedy=texts))
    with pytest.raises(VerificationError, match=rf"transformers' generate wrote {length} tokens"):
        refuse_wrong_text(model, replace(reference, generated=reference.generated[:length]), right)


@pytest.mark.parametrize("error", [0.01, float("nan")])
def test_decoder_with_wrong_probabilities_is_refused(right: DecoderAgreement, error: float) -> None:
    refuse_wrong_probabilities(right.error)
    with pytest.raises(VerificationError, match="log-probabilities are off by"):
        refuse_wrong_probabilities(error)


class ByPyTorch(Executor):
    """Executor that runs PyTorch over all tokens of a slot."""

    def __init__(self, geometry: Geometry, said: Callable[[tuple[int, ...]], np.ndarray]) -> None:
        super().__init__(geometry)
        self.said = said
        self.texts: list[list[int]] = [[] for _ in range(geometry.slots)]

    def run(self, first: int, tokens: np.ndarray, lengths: np.ndarray, wanted: np.ndarray | None = None) -> np.ndarray:
        rows = enumerate(zip(tokens.tolist(), lengths.tolist(), strict=True), first)
        logits = np.concatenate([self.answer(slot, new, held) for slot, (new, held) in rows])
        return logits[last_of_rows(tokens) if wanted is None else wanted]

    def answer(self, slot: int, new: list[int], held: int) -> np.ndarray:
        """Return the logits of shape (new, vocabulary)."""
        self.texts[slot] = [*self.texts[slot][:held], *new]
        return self.said(tuple(self.texts[slot]))[-len(new) :]

    def copy(self, source: int, target: int, length: int, start: int = 0) -> None:
        self.texts[target][start:length] = self.texts[source][start:length]


class WrongAlone(ByPyTorch):
    """Executor that answers a single token of a single row wrongly."""

    def run(self, first: int, tokens: np.ndarray, lengths: np.ndarray, wanted: np.ndarray | None = None) -> np.ndarray:
        return super().run(first, tokens, lengths, wanted) * (-1 if tokens.size == 1 else 1)


class LengthsOfTheFirst(ByPyTorch):
    """Executor that treats all rows of a call as equally long as the first."""

    def run(self, first: int, tokens: np.ndarray, lengths: np.ndarray, wanted: np.ndarray | None = None) -> np.ndarray:
        return super().run(first, tokens, np.full_like(lengths, lengths[0]), wanted)


class StepsForget(ByPyTorch):
    """Executor where a single token does not see the first of its row."""

    def answer(self, slot: int, new: list[int], held: int) -> np.ndarray:
        answer = super().answer(slot, new, held)
        return self.said(tuple(self.texts[slot][1:]))[-1:] if len(new) == 1 and held else answer


class PromptsForget(ByPyTorch):
    """Executor where the second token of a prompt sees nothing before it."""

    def answer(self, slot: int, new: list[int], held: int) -> np.ndarray:
        answer = super().answer(slot, new, held).copy()
        if len(new) > 1 and not held:
            answer[1] = self.said((new[1],))[-1]
        return answer


class RowsChange(ByPyTorch):
    """Executor that exchanges the answers of the last two rows, from three rows on."""

    def run(self, first: int, tokens: np.ndarray, lengths: np.ndarray, wanted: np.ndarray | None = None) -> np.ndarray:
        logits = super().run(first, tokens, lengths, wanted)
        return logits[[*range(len(logits) - 2), -1, -2]] if len(tokens) > 2 else logits


@pytest.fixture(scope="module")
def said(model: PreTrainedModel) -> Callable[[tuple[int, ...]], np.ndarray]:
    """Return PyTorch's logits after each token of a text, (tokens, vocabulary)."""

    @functools.cache
    def logits(text: tuple[int, ...]) -> np.ndarray:
        with torch.no_grad():
            answer: np.ndarray = model(input_ids=torch.tensor([text]), use_cache=False).logits[0].numpy()
        return answer

    return logits


@pytest.mark.parametrize("kind", [ByPyTorch, WrongAlone, LengthsOfTheFirst, StepsForget, PromptsForget, RowsChange])
def test_decoder_on_a_faulty_engine_is_refused(
    model: PreTrainedModel,
    reference: DecoderReference,
    said: Callable[[tuple[int, ...]], np.ndarray],
    kind: type[ByPyTorch],
) -> None:
    """They are refused even if few tokens are decoded one by one, as for a graph in fp32."""

    def verify() -> None:
        agreement = measure(lambda geometry: kind(geometry, said), CACHES, VOCABULARY, reference, order=EXACT)
        refuse_wrong_probabilities(agreement.error)
        refuse_wrong_text(model, reference, agreement)

    if kind is ByPyTorch:
        verify()
        return
    with pytest.raises(VerificationError, match=r"log-probabilities are off by|greedy token \d+ of the fused graph"):
        verify()
