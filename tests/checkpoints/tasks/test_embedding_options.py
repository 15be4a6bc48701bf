"""Options of embedding requests: prompts, dimensions, and windows over long texts, beside sentence-transformers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer

from builder.checkpoints.resolve import resolve
from builder.common.tensors import to_tensors
from builder.options import make_spec
from builder.runtime.encoder.pipeline import Pipeline
from tests.fronts import front_over_pytorch
from tests.tiny_encoders import make_checkpoint

LIMIT = 48  # tokens of one text
PROMPTS = {"query": "find this: ", "document": ""}
LONG = " ".join(f"The soup of day {day} needs salt, Zürich 日本 says; whereabouts unknown." for day in range(12))
TEXTS = ["How do I renew my passport?", LONG, "a fox", LONG[40:], LONG[: len(LONG) // 2]]


@pytest.fixture(scope="module", params=["bert", "xlm-roberta", "roberta"])
def embedder(request: pytest.FixtureRequest, module_folder: Callable[[str], Path]) -> Path:
    """Save a tiny model with prompts that normalises, by sentence-transformers itself."""
    folder = module_folder(f"options-{request.param}")
    transformer = Transformer(str(make_checkpoint(folder / "plain", request.param, "feature-extraction")))
    transformer.max_seq_length = LIMIT
    modules = [transformer, Pooling(transformer.get_embedding_dimension(), "mean"), Normalize()]
    SentenceTransformer(modules=modules, device="cpu", prompts=PROMPTS, default_prompt_name="document").save_pretrained(
        str(folder / "saved")
    )
    return folder / "saved"


@pytest.fixture(scope="module")
def front(embedder: Path) -> Pipeline:
    spec = make_spec(model=str(embedder), max_length=LIMIT)
    (folder := embedder.parent / "front").mkdir()
    return front_over_pytorch(resolve(spec), spec, folder)


@pytest.fixture(scope="module")
def theirs(embedder: Path) -> SentenceTransformer:
    return SentenceTransformer(str(embedder), device="cpu")


def ask(front: Pipeline, texts: Sequence[str], **options: Any) -> Any:
    """Return the answer to one request, or the error."""
    inputs = front.task.inputs(front.serving.parameters)
    tensors = to_tensors({"text_input": texts[0], **options}, inputs)
    tensors = {name: np.repeat(value, len(texts), axis=0) for name, value in tensors.items()}
    tensors["text_input"] = np.array([[text.encode()] for text in texts], np.object_)
    (answer,) = front([tensors])
    return answer


def windows(theirs: SentenceTransformer, text: str, prompt: str, overlap: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the vector of each window of a text and its share of the tokens, with transformers' tokenizer."""
    tokenizer = theirs.tokenizer
    around = tokenizer("", add_special_tokens=True)["input_ids"]
    body = tokenizer(prompt + text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    ids, ends = body["input_ids"], [end for _, end in body["offset_mapping"]]
    head = next(place for place, end in enumerate(ends) if end > len(prompt))
    size = LIMIT - len(around) - head
    starts = range(0, max(1, len(ids) - head - overlap), size - overlap)
    parts = [list(range(head + start, min(head + start + size, len(ids)))) for start in starts]
    vectors = []
    for part in parts:
        row = torch.tensor([[around[0], *ids[:head], *(ids[at] for at in part), around[1]]])
        with torch.no_grad():
            features = theirs({"input_ids": row, "attention_mask": torch.ones_like(row)})
        vectors.append(features["sentence_embedding"][0].numpy())
    shared = np.bincount(np.concatenate(parts), minlength=len(ids))
    return np.array(vectors), np.array([(1 / shared[part]).sum() for part in parts])


def unit(vector: np.ndarray) -> np.ndarray:
    return vector / np.linalg.norm(vector)


@pytest.mark.parametrize("options", [{}, {"prompt_name": "query"}, {"prompt": "say: "}, {"prompt": ""}])
def test_prompts_equal_those_of_sentence_transformers(
    options: dict[str, Any], front: Pipeline, theirs: SentenceTransformer
) -> None:
    texts = [TEXTS[0], "a fox", "日本 Zürich"]
    answer = ask(front, texts, **options)
    np.testing.assert_allclose(answer["embedding"], theirs.encode(texts, **options), atol=2e-6)


@pytest.mark.parametrize("dimensions", [1, 7, 32])
def test_dimensions_are_cut_then_normalised(dimensions: int, front: Pipeline, theirs: SentenceTransformer) -> None:
    texts = [TEXTS[0], "a fox"]
    answer = ask(front, texts, dimensions=dimensions)["embedding"]
    expected = theirs.encode(texts, truncate_dim=dimensions, normalize_embeddings=True)
    np.testing.assert_allclose(answer, expected, atol=2e-6)


@pytest.mark.parametrize(
    ("chunking", "prompt_name", "overlap"), [("mean", "document", 5), ("mean", "query", 20), ("max", "query", 0)]
)
def test_long_texts_are_joined_from_windows(
    chunking: str, prompt_name: str, overlap: int, front: Pipeline, theirs: SentenceTransformer
) -> None:
    """Every window repeats the prompt; each token of the text weighs the same in the mean."""
    answer = ask(front, TEXTS, chunking=chunking, chunk_overlap=overlap, prompt_name=prompt_name)
    assert not answer["truncated"].any()
    for text, vector in zip(TEXTS, answer["embedding"], strict=True):
        vectors, weights = windows(theirs, text, PROMPTS[prompt_name], overlap)
        joined = vectors.max(axis=0) if chunking == "max" else weights @ vectors / weights.sum()
        np.testing.assert_allclose(vector, unit(joined), atol=3e-6)
        if len(vectors) == 1:
            np.testing.assert_allclose(vector, theirs.encode(text, prompt_name=prompt_name), atol=3e-6)


def test_dimensions_of_a_long_text_are_those_of_its_vector(front: Pipeline) -> None:
    whole = ask(front, [LONG], chunking="mean")["embedding"][0]
    short = ask(front, [LONG], chunking="mean", dimensions=8)["embedding"][0]
    np.testing.assert_allclose(short, unit(whole[:8]), atol=2e-6)


def test_batch_mates_do_not_change_the_vector_of_a_long_text(front: Pipeline) -> None:
    together = ask(front, TEXTS, chunking="mean")["embedding"]
    for text, vector in zip(TEXTS, together, strict=True):
        np.testing.assert_allclose(ask(front, [text], chunking="mean")["embedding"][0], vector, atol=3e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "limit of this model is 48: .* chunking=mean"),
        ({"chunking": "late"}, "chunking is 'late', and this model was built without it"),
        ({"chunking": "mean", "chunk_overlap": 46}, "chunk_overlap is 46; .* send a smaller chunk_overlap"),
        ({"chunking": "mean", "prompt": LONG}, "or a shorter prompt"),
        ({"chunking": "mean", "chunk_overlap": -1}, "chunk_overlap is -1; expected at least 0"),
        ({"dimensions": 33}, "dimensions is 33; expected at most 32"),
        ({"dimensions": 0}, "dimensions is 0; expected at least 1"),
        ({"prompt": "a", "prompt_name": "query"}, "send one of them"),
        ({"prompt_name": "passage"}, "prompt_name is 'passage'; this model has document, query"),
    ],
)
def test_embedding_options_out_of_range_are_refused(options: dict[str, Any], message: str, front: Pipeline) -> None:
    error = ask(front, [LONG], **options)
    assert isinstance(error, Exception), error
    with pytest.raises(type(error), match=message):
        raise error
