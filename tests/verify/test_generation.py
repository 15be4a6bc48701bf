"""A decoder's text against PyTorch's: each token the best after those before it, by a run over the whole text."""

from __future__ import annotations

from dataclasses import replace

import pytest
from transformers import PreTrainedModel

from builder.errors import VerificationError
from builder.verify.generation import (
    NEW_TOKENS,
    Agreement,
    Reference,
    greedy_tokens,
    make_reference,
    refuse_wrong_probabilities,
    refuse_wrong_text,
)
from tests.decoders import make_decoder
from tests.export.test_decoders import prompts


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return make_decoder("llama")


@pytest.fixture(scope="module")
def reference(model: PreTrainedModel) -> Reference:
    return make_reference(model, prompts())


@pytest.fixture(scope="module")
def right(model: PreTrainedModel, reference: Reference) -> Agreement:
    """What a graph says that says what transformers' generate does."""
    texts = tuple(tuple(greedy_tokens(model, prompt, NEW_TOKENS)) for prompt in reference.prompts)
    return Agreement(0.0, 1.0, 1.0, reference.perplexity, 1.0, texts)


def test_the_text_of_generate_is_right(model: PreTrainedModel, reference: Reference, right: Agreement) -> None:
    assert reference.generated == right.greedy[0]
    refuse_wrong_text(model, reference, right)


@pytest.mark.parametrize(("number", "position"), [(0, 0), (3, 7), (5, NEW_TOKENS - 1)])
def test_one_other_token_is_refused_wherever_it_is(
    model: PreTrainedModel, reference: Reference, right: Agreement, number: int, position: int
) -> None:
    texts = [list(text) for text in right.greedy]
    expected = texts[number][position]
    texts[number][position] = expected ^ 1
    with pytest.raises(
        VerificationError, match=rf"greedy token {position + 1} of the fused graph is {expected ^ 1}, .* "
    ):
        refuse_wrong_text(model, reference, replace(right, greedy=tuple(map(tuple, texts))))


def test_a_model_whose_generate_is_no_forward_pass_is_refused(
    model: PreTrainedModel, reference: Reference, right: Agreement
) -> None:
    """The graph is what the forward pass says; what people get from transformers would be something else."""
    other = (*reference.generated[:-1], reference.generated[-1] ^ 1)
    with pytest.raises(VerificationError, match=rf"greedy token {NEW_TOKENS} of transformers' generate is "):
        refuse_wrong_text(model, replace(reference, generated=other), right)


@pytest.mark.parametrize("length", [0, NEW_TOKENS - 1])
def test_a_text_that_ends_too_soon_is_refused(
    model: PreTrainedModel, reference: Reference, right: Agreement, length: int
) -> None:
    texts = (*right.greedy[:3], right.greedy[3][:length], *right.greedy[4:])
    with pytest.raises(VerificationError, match=rf"the fused graph wrote {length} tokens instead of {NEW_TOKENS}"):
        refuse_wrong_text(model, reference, replace(right, greedy=texts))
    with pytest.raises(VerificationError, match=rf"transformers' generate wrote {length} tokens"):
        refuse_wrong_text(model, replace(reference, generated=reference.generated[:length]), right)


@pytest.mark.parametrize("error", [0.01, float("nan")])
def test_other_probabilities_are_refused(right: Agreement, error: float) -> None:
    refuse_wrong_probabilities(right)
    with pytest.raises(VerificationError, match="log-probabilities are off by"):
        refuse_wrong_probabilities(replace(right, error=error))
