"""Embeddings whose tokens the front pools: late chunking beside transformers, and pooling without the prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Dense
from sentence_transformers.sentence_transformer.modules import LayerNorm, Normalize, Pooling, Transformer

from builder import build
from builder.checkpoints.resolve import resolve
from builder.checkpoints.tasks.base import encoder_task
from builder.common.errors import CheckpointError, SpecError
from builder.common.tensors import to_tensors
from builder.options import make_spec
from builder.repository.config.render import parse
from builder.runtime.encoder.front import open_front
from builder.runtime.encoder.late_chunks import joined
from builder.runtime.encoder.pipeline import Pipeline
from builder.runtime.encoder.task import TRUNCATE
from builder.runtime.fields import InputError
from tests.fronts import front_over_pytorch
from tests.tiny_encoders import make_checkpoint

LIMIT = 64  # tokens of a document
PROMPTS = {"query": "find this: ", "document": ""}
DOCUMENTS = {
    "one": ["How do I renew my passport?"],
    "parts": ["The soup needs salt.", "Zürich 日本 says: unknown 🚆.", "A fox", "ran."],
    "spaces": ["The soup ", "needs", " salt.\n", "A fox"],
    "words": ["a", "b", "c", "d", "e"],
}


@pytest.fixture(scope="module", params=["bert", "xlm-roberta", "roberta"])
def embedder(request: pytest.FixtureRequest, module_folder: Callable[[str], Path]) -> Path:
    return saved(module_folder(f"late-{request.param}"), request.param, [Normalize()])


def saved(folder: Path, model_type: str, after: Sequence[torch.nn.Module], **pooling: Any) -> Path:
    """Save a tiny model with prompts and the mean as its pooling, by sentence-transformers itself."""
    transformer = Transformer(str(make_checkpoint(folder / "plain", model_type, "feature-extraction")))
    transformer.max_seq_length = LIMIT
    modules = [transformer, Pooling(32, **{"pooling_mode": "mean", **pooling}), *after]
    SentenceTransformer(modules=modules, device="cpu", prompts=PROMPTS).save_pretrained(str(folder / "saved"))
    return folder / "saved"


@pytest.fixture(scope="module")
def front(embedder: Path) -> Pipeline:
    return front_of(embedder, late_chunking=True)


def front_of(checkpoint: Path, **options: Any) -> Pipeline:
    spec = make_spec(model=str(checkpoint), **options)
    (folder := checkpoint.parent / f"front-{len(options)}").mkdir()
    return front_over_pytorch(resolve(spec), spec, folder)


def request_of(front: Pipeline, texts: Sequence[str], **options: Any) -> dict[str, np.ndarray]:
    tensors = to_tensors({"text_input": "x", **options}, (*front.task.inputs(front.serving.parameters), TRUNCATE))
    tensors = {name: np.repeat(value, len(texts), axis=0) for name, value in tensors.items()}
    return {**tensors, "text_input": np.array([[text.encode()] for text in texts], np.object_)}


def ask(front: Pipeline, texts: Sequence[str], **options: Any) -> Any:
    """Return the answer to one request, or the error."""
    (answer,) = front([request_of(front, texts, **options)])
    return answer


def late(library: SentenceTransformer, texts: Sequence[str], prompt: str = "") -> np.ndarray:
    """Compute late chunking with transformers' own tokenizer and model, character by character."""
    document, owners = prompt, [0] * len(prompt)
    for number, text in enumerate(texts):
        if number and not (document[-1].isspace() or text[0].isspace()):
            document, owners = document + " ", [*owners, number]
        document, owners = document + text, [*owners, *[number] * len(text)]
    encoded = library.tokenizer(document, return_tensors="pt", return_offsets_mapping=True)
    offsets, special = encoded.pop("offset_mapping")[0].tolist(), library.tokenizer.all_special_ids
    with torch.no_grad():
        states = library[0].model(**encoded).last_hidden_state[0].numpy()
    of_tokens = [owners[end - 1] for _, end in offsets[1:-1]]
    assert encoded["input_ids"][0, 0] in special
    chunks = np.array([0, *of_tokens, len(texts) - 1])
    means = np.stack([states[chunks == number].mean(axis=0) for number in range(len(texts))])
    return means / np.linalg.norm(means, axis=1, keepdims=True)


@pytest.mark.parametrize("name", DOCUMENTS)
@pytest.mark.parametrize("prompt", ["", "find this: "])
def test_late_chunking_equals_the_means_of_transformers(
    name: str, prompt: str, embedder: Path, front: Pipeline
) -> None:
    texts = DOCUMENTS[name]
    library = SentenceTransformer(str(embedder), device="cpu")
    answer = ask(front, texts, chunking="late", **({"prompt_name": "query"} if prompt else {}))
    np.testing.assert_allclose(answer["embedding"], late(library, texts, prompt), atol=2e-6)
    document = prompt + joined("", texts)[0]
    assert answer["prompt_tokens"].sum() == len(library.tokenizer(document)["input_ids"])
    if len(texts) == 1:
        expected = library.encode(texts, prompt=prompt)
        np.testing.assert_allclose(answer["embedding"], expected, atol=2e-6)


def test_documents_and_texts_share_a_batch(embedder: Path, front: Pipeline) -> None:
    library = SentenceTransformer(str(embedder), device="cpu")
    documents = list(DOCUMENTS.values())
    requests = [request_of(front, texts, chunking="late") for texts in documents]
    *chunked, plain = front([*requests, request_of(front, DOCUMENTS["parts"])])
    for texts, answer in zip(documents, chunked, strict=True):
        assert isinstance(answer, dict)
        np.testing.assert_allclose(answer["embedding"], late(library, texts), atol=2e-6)
    assert isinstance(plain, dict)
    np.testing.assert_allclose(plain["embedding"], library.encode(DOCUMENTS["parts"]), atol=2e-6)


def test_windows_and_dimensions_work_without_late_chunking(embedder: Path, front: Pipeline) -> None:
    library, plain = SentenceTransformer(str(embedder), device="cpu"), front_of(embedder)
    long = [" ".join(f"The soup of day {day} needs salt." for day in range(20)), "a fox"]
    for options in ({"chunking": "mean"}, {"chunking": "max", "prompt_name": "query"}, {"truncate": True}):
        ours, theirs = (ask(one, long, **options)["embedding"] for one in (front, plain))
        np.testing.assert_allclose(ours, theirs, atol=2e-6)
    expected = library.encode(["a fox"], truncate_dim=7, normalize_embeddings=True)
    np.testing.assert_allclose(ask(front, ["a fox"], dimensions=7)["embedding"], expected, atol=2e-6)
    assert "late_chunking" not in plain.serving.parameters
    refused = ask(plain, ["a fox"], chunking="late")
    assert isinstance(refused, InputError)
    assert "built without it (--late-chunking)" in str(refused)


def test_documents_that_cannot_be_chunked_are_refused(front: Pipeline) -> None:
    long = ask(front, ["The soup of the day needs salt."] * 20, chunking="late", truncate=True)
    assert isinstance(long, InputError)
    assert f"the limit of this model is {LIMIT}" in str(long)


@pytest.fixture(scope="module")
def unscaled(module_folder: Callable[[str], Path]) -> Path:
    return saved(module_folder("empty"), "bert", [])


@pytest.fixture(scope="module")
def unscaled_front(unscaled: Path) -> Pipeline:
    return front_of(unscaled, late_chunking=True)


@pytest.mark.parametrize("row", [0, 1, 2])
@pytest.mark.parametrize("options", [{}, {"prompt_name": "query"}])
def test_text_without_a_token_of_its_own_is_refused(
    options: dict[str, str], row: int, unscaled_front: Pipeline
) -> None:
    """Regression: the first text got the vector of [CLS] and the prompt, and the last one that of [SEP]."""
    texts = ["a fox", "the soup", "ran"]
    texts[row] = "\u200b"
    empty = ask(unscaled_front, texts, chunking="late", **options)
    assert isinstance(empty, InputError)
    assert f"row {row}, has no token of its own" in str(empty)


def test_document_of_one_empty_text_has_its_usual_embedding(unscaled: Path, unscaled_front: Pipeline) -> None:
    library = SentenceTransformer(str(unscaled), device="cpu")
    for options in ({}, {"prompt_name": "query"}):
        answer = ask(unscaled_front, ["\u200b"], chunking="late", **options)
        np.testing.assert_allclose(answer["embedding"], library.encode(["\u200b"], **options), atol=2e-6)


def test_late_chunking_is_built_and_declared(module_folder: Callable[[str], Path], tmp_path: Path) -> None:
    torch.manual_seed(0)
    linear = Dense(32, 8, activation_function=torch.nn.Identity())
    checkpoint = saved(module_folder("built"), "bert", [linear, Normalize()])
    report = build(make_spec(model=str(checkpoint), name="late", output=tmp_path, late_chunking=True))
    assert report.verified
    config = parse((tmp_path / "late" / "config.pbtxt").read_text(), "late")
    assert config.parameters["late_chunking"].string_value == "true"
    front = open_front(tmp_path / "late" / "1")
    library = SentenceTransformer(str(checkpoint), device="cpu")
    for texts in DOCUMENTS.values():
        np.testing.assert_allclose(ask(front, texts)["embedding"], library.encode(texts), atol=1e-5)
    whole = ask(front, DOCUMENTS["one"], chunking="late")["embedding"]
    np.testing.assert_allclose(whole, library.encode(DOCUMENTS["one"]), atol=1e-5)


@pytest.mark.parametrize(
    ("after", "pooling", "found"),
    [
        ([Dense(32, 8)], {}, "this checkpoint has a Tanh after it"),
        ([LayerNorm(32)], {}, "this checkpoint has a LayerNorm after it"),
        ([], {"pooling_mode": "cls"}, "this checkpoint has the pooling cls"),
        ([], {"pooling_mode": ("mean", "max")}, "the pooling mean and max"),
    ],
)
def test_late_chunking_refuses_what_is_not_a_mean(
    after: list[torch.nn.Module], pooling: dict[str, Any], found: str, tmp_path: Path
) -> None:
    checkpoint = resolve(make_spec(model=str(saved(tmp_path, "bert", after, **pooling)), late_chunking=True))
    with pytest.raises(CheckpointError, match=found):
        encoder_task(checkpoint.task).parameters(checkpoint)


def test_late_chunking_refuses_other_tasks(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="text-classification has none"):
        build(make_spec(model=str(checkpoint("topics")), output=tmp_path, late_chunking=True))
    unpooled = resolve(make_spec(model=str(checkpoint("features")), task="feature-extraction", late_chunking=True))
    with pytest.raises(CheckpointError, match="does not say how its tokens become one embedding"):
        encoder_task(unpooled.task).parameters(unpooled)


@pytest.mark.parametrize("model_type", ["bert", "xlm-roberta"])
def test_pooling_without_the_prompt_equals_sentence_transformers(model_type: str, tmp_path: Path) -> None:
    """As Instructor: the model reads the prompt, and the mean leaves it out, with special tokens before it."""
    torch.manual_seed(0)
    linear = Dense(32, 8, bias=False, activation_function=torch.nn.Identity())
    folder = saved(tmp_path, model_type, [linear, Normalize()], include_prompt=False)
    library, checkpoint = SentenceTransformer(str(folder), device="cpu"), resolve(make_spec(model=str(folder)))
    texts = ["How do I renew my passport?", "Zürich 日本 🚆", "a fox"]
    front = front_of(folder)
    for options in ({}, {"prompt_name": "query"}, {"prompt": "say: "}, {"prompt": ""}):
        expected = library.encode(texts, **options)
        np.testing.assert_allclose(ask(front, texts, **options)["embedding"], expected, atol=2e-6)
        for row, text in enumerate(texts):
            answer = encoder_task(checkpoint.task).reference(checkpoint, {"text_input": text, **options})
            np.testing.assert_allclose(answer["embedding"], expected[row], atol=2e-6)


def test_prompt_that_fills_the_limit_is_refused_where_it_is_not_pooled(tmp_path: Path) -> None:
    """Regression: with truncate, such a prompt left the mean of no token, which is zero, or that of [SEP] alone."""
    folder = saved(tmp_path, "bert", [], include_prompt=False)
    front, library = front_of(folder), SentenceTransformer(str(folder), device="cpu")
    for words in (LIMIT - 2, LIMIT):
        full = ask(front, ["a fox"], prompt="a " * words, truncate=True)
        assert isinstance(full, InputError)
        assert "the prompt alone fills the model's limit" in str(full)
    prompt = "a " * (LIMIT - 3)  # beside [CLS] and [SEP], one token of the text is left
    answer = ask(front, ["a fox"], prompt=prompt, truncate=True)
    np.testing.assert_allclose(answer["embedding"], library.encode(["a fox"], prompt=prompt), atol=2e-6)


def test_pooling_without_the_prompt_is_refused_for_other_poolings(tmp_path: Path) -> None:
    folder = saved(tmp_path, "bert", [], pooling_mode="cls", include_prompt=False)
    with pytest.raises(CheckpointError, match=r"pools cls without its prompt .*the mean alone"):
        resolve(make_spec(model=str(folder)))
