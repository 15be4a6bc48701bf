"""Late interaction by the emitted code equals sentence-transformers, of each format that it reads."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import MultiVectorEncoder
from sentence_transformers.base.modules import Dense, Normalize, Transformer
from sentence_transformers.multi_vector_encoder.modules import HierarchicalTokenPooling, MultiVectorMask

from builder.checkpoints.resolve import resolve
from builder.common.errors import CheckpointError
from builder.common.samples import TEXTS
from builder.options import make_spec
from builder.runtime.encoder.pipeline import Pipeline
from builder.runtime.encoder.token_pooling import pool
from tests.fronts import answers, front_over_pytorch
from tests.tiny_encoders import make_checkpoint, make_colbert

UNICODE = "Zürich – 東京, and the naïve 🚆 café."
PYLATE = [
    {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
    {"idx": 1, "name": "1", "path": "1_Dense", "type": "pylate.models.Dense.Dense"},
]


def _write(path: Path, document: Any) -> None:
    path.write_text(json.dumps(document))


def _native(folder: Path, model_type: str, expansion: dict[str, Any] | None) -> Path:
    make_checkpoint(folder / "base", model_type, "feature-extraction")
    torch.manual_seed(1)
    options = {"module_input_name": "token_embeddings"}
    encoder = MultiVectorEncoder(
        modules=[
            Transformer(str(folder / "base"), document_length=48, query_expansion=expansion),
            Dense(32, 24, activation_function=torch.nn.Tanh(), **options),
            Dense(24, 16, bias=False, activation_function=torch.nn.Identity(), **options),
            MultiVectorMask(skiplist_words=[",", "."]),
            Normalize(module_input_name="token_embeddings"),
        ],
        prompts={"query": "search: ", "document": "passage: "},
        device="cpu",
    )
    encoder.save(str(folder / "native"))
    return folder / "native"


def _pylate(folder: Path, **config: Any) -> Path:
    native = _native(folder, "bert", None)
    target = folder / "pylate"
    shutil.copytree(folder / "base", target)
    torch.manual_seed(2)
    dense = Dense(32, 16, bias=False, activation_function=torch.nn.Identity())
    (target / "1_Dense").mkdir()
    dense.save(str(target / "1_Dense"))
    _write(
        target / "1_Dense" / "config.json",
        {
            "in_features": 32,
            "out_features": 16,
            "bias": False,
            "activation_function": "torch.nn.modules.linear.Identity",
        },
    )
    _write(target / "modules.json", PYLATE)
    known = {"query_prefix": "[unused0] ", "document_prefix": "[unused1] ", "query_length": 20, "document_length": 40}
    _write(target / "config_sentence_transformers.json", {**known, **config})
    shutil.rmtree(native)
    return target


MAKERS: dict[str, Callable[[Path], Path]] = {
    "bert": lambda folder: _native(folder, "bert", {"strategy": "fixed", "length": 24}),
    "modernbert": lambda folder: _native(folder, "modernbert", {"strategy": "min", "attend": True, "length": 12}),
    "plain": lambda folder: _native(folder, "modernbert", None),
    "pylate": lambda folder: _pylate(folder, model_type="ColBERT", attend_to_expansion_tokens=True),
    "pylate_first": lambda folder: _pylate(folder),
    "pylate_unexpanded": lambda folder: _pylate(folder, do_query_expansion=False),
    "stanford": lambda folder: make_colbert(make_checkpoint(folder / "stanford", "bert", "feature-extraction")),
}


@pytest.fixture(scope="module", params=list(MAKERS))
def saved(request: pytest.FixtureRequest, module_folder: Callable[[str], Path]) -> Path:
    return MAKERS[request.param](module_folder(request.param))


@pytest.fixture
def served(saved: Path, tmp_path: Path) -> tuple[Pipeline, Any, MultiVectorEncoder]:
    spec = make_spec(model=str(saved), truncate=True)
    checkpoint = resolve(spec)
    assert checkpoint.task.name == "multi-vector-embedding"
    return front_over_pytorch(checkpoint, spec, tmp_path), checkpoint, MultiVectorEncoder(str(saved), device="cpu")


def _assert_same(actual: Any, expected: np.ndarray) -> None:
    vectors = np.asarray(actual)
    assert vectors.shape == expected.shape
    cosines = (vectors * expected).sum(-1) / np.linalg.norm(vectors, axis=-1) / np.linalg.norm(expected, axis=-1)
    assert cosines.min() >= 0.999999
    np.testing.assert_allclose(vectors, expected, atol=1e-5)


def test_vectors_equal_sentence_transformers(served: tuple[Pipeline, Any, MultiVectorEncoder]) -> None:
    """Short, long and Unicode texts, queries and documents, alone and mixed in one batch."""
    front, checkpoint, library = served
    texts = [TEXTS[0], UNICODE, TEXTS[20], TEXTS[31]]
    samples = [{"text_input": text, "input_type": kind} for kind in ("query", "document") for text in texts]
    expected = [
        encode([text], convert_to_numpy=True)[0]
        for encode in (library.encode_query, library.encode_document)
        for text in texts
    ]
    alone = [answers(front, checkpoint, [sample])[0] for sample in samples]
    for actual, mixed, vectors in zip(alone, answers(front, checkpoint, samples), expected, strict=True):
        _assert_same(actual["vectors"], vectors)
        _assert_same(mixed["vectors"], vectors)
    assert alone[-1]["truncated"]


def test_ranking_equals_sentence_transformers(served: tuple[Pipeline, Any, MultiVectorEncoder]) -> None:
    front, checkpoint, library = served
    samples = [{"query": query, "documents": list(TEXTS[2:26])} for query in (TEXTS[0], UNICODE)]
    scores = library.similarity(
        library.encode_query([TEXTS[0], UNICODE]), library.encode_document(list(TEXTS[2:26]))
    ).numpy()
    for answer, expected in zip(answers(front, checkpoint, samples), scores, strict=True):
        np.testing.assert_allclose(answer["score"], expected, rtol=1e-5)
        assert answer["order"] == np.argsort(-expected, kind="stable").tolist()


@pytest.fixture(scope="module")
def bert(module_folder: Callable[[str], Path]) -> Path:
    return MAKERS["bert"](module_folder("offsets"))


def test_offsets_are_characters_of_the_text(bert: Path, tmp_path: Path) -> None:
    spec = make_spec(model=str(bert))
    checkpoint = resolve(spec)
    front = front_over_pytorch(checkpoint, spec, tmp_path)
    query, document = answers(
        front, checkpoint, [{"text_input": "Zürich – 東京", "input_type": "query"}, {"text_input": UNICODE}]
    )
    for answer in (query, document):
        parts = [UNICODE[start:end] for start, end in answer["offsets"] if start >= 0]
        assert "".join(parts).startswith("Z")
        assert answer["vector_count"] == len(answer["vectors"])
    assert "," not in [UNICODE[start:end] for start, end in document["offsets"] if start >= 0]
    assert query["offsets"][0] == query["offsets"][-1] == [-1, -1]


def test_pooled_documents_equal_sentence_transformers(bert: Path, tmp_path: Path) -> None:
    spec = make_spec(model=str(bert))
    checkpoint = resolve(spec)
    sample = {"text_input": TEXTS[12], "pool_factor": 3}
    (answer,) = answers(front_over_pytorch(checkpoint, spec, tmp_path), checkpoint, [sample])
    library = MultiVectorEncoder(str(bert), device="cpu")
    (expected,) = library.encode_document([TEXTS[12]], convert_to_numpy=True, token_pooling=HierarchicalTokenPooling(3))
    _assert_same(answer["vectors"], expected)


def test_token_pooling_equals_scipys_linkage() -> None:
    generator = np.random.default_rng(0)
    for _ in range(60):
        size, factor = int(generator.integers(2, 50)), float(generator.choice([1.5, 2, 3, 100]))
        vectors = generator.normal(size=(size, 8)).astype(np.float32)
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        theirs = HierarchicalTokenPooling(factor, normalize_embeddings=False).pool_one(torch.from_numpy(vectors))
        np.testing.assert_allclose(pool(vectors, factor)[0], theirs.numpy(), atol=1e-6)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({}, "the request has no text; send text_input to get vectors"),
        ({"query": "a"}, "the request has query; send"),
        ({"text_input": "a", "query": "a"}, "the request has text_input and query"),
        ({"query": "a", "documents": "b", "input_type": "query"}, "input_type is for text_input"),
        ({"text_input": " "}, "is empty"),
        ({"text_input": TEXTS[31], "input_type": "query"}, "a query of this model has at most 24"),
        ({"text_input": TEXTS[31]}, "a document of this model has at most 48"),
    ],
)
def test_invalid_requests_are_refused(tensors: dict[str, str], message: str, bert: Path, tmp_path: Path) -> None:
    spec = make_spec(model=str(bert))
    front = front_over_pytorch(resolve(spec), spec, tmp_path)
    (answer,) = front([{name: np.array([[text.encode()]], object) for name, text in tensors.items()}])
    assert message in str(answer)


def test_pickled_projection_is_refused(bert: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(bert, tmp_path / "copy"))
    (folder / "1_Dense" / "model.safetensors").rename(folder / "1_Dense" / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"no model\.safetensors"):
        resolve(make_spec(model=str(folder)))
