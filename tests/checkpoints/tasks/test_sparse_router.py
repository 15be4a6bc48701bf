"""Sparse encoders with a Router answer queries from a table and documents by SPLADE, as sentence-transformers does."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sentence_transformers import SparseEncoder

from builder.building.pipeline import build
from builder.checkpoints.resolve import resolve
from builder.checkpoints.sentence_transformers import read_modules
from builder.checkpoints.tasks.base import encoder_task
from builder.common.errors import CheckpointError
from builder.options import make_spec
from builder.runtime.encoder.front import open_front
from builder.runtime.encoder.pipeline import Pipeline
from builder.runtime.fields import InputError
from tests.fronts import front_over_pytorch
from tests.retrievers import make_router

TEXTS = ["the train leaves at nine", "a fox", "the the museum", "Zürich 🦊 [SEP] 東京", "the museum is closed " * 5]


@pytest.fixture(scope="module")
def router(module_folder: Callable[[str], Path]) -> Path:
    return make_router(module_folder("router") / "saved")


@pytest.fixture
def copy(router: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(router, tmp_path / "router"))


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def ask(front: Pipeline, texts: Sequence[str], **options: str | bool) -> Any:
    tensors = {"text_input": np.array([[text.encode()] for text in texts], np.object_)}
    for name, value in options.items():
        one = value.encode() if isinstance(value, str) else value
        tensors[name] = np.array([[one]] * len(texts), np.object_ if isinstance(value, str) else bool)
    (answer,) = front([tensors])
    return answer


def assert_equal(answer: Any, theirs: Any) -> None:
    assert isinstance(answer, dict), answer
    for indices, values, expected in zip(answer["indices"], answer["values"], theirs.numpy(), strict=True):
        tokens = np.flatnonzero(expected)
        assert indices[indices >= 0].tolist() == tokens.tolist()
        np.testing.assert_allclose(values[indices >= 0], expected[tokens], atol=1e-5)


def pytorch_front(folder: Path, path: Path) -> Pipeline:
    path.mkdir()
    spec = make_spec(model=str(folder))
    return front_over_pytorch(resolve(spec), spec, path)


def test_router_built_answers_like_sentence_transformers(router: Path, tmp_path: Path) -> None:
    report = build(make_spec(model=str(router), name="router", output=tmp_path / "models"))
    assert (report.task, report.verified) == ("sparse-embedding", True)
    front = open_front(tmp_path / "models" / "router" / "1")
    library = SparseEncoder(str(router), device="cpu")
    for texts in (TEXTS[:1], TEXTS):
        theirs = library.encode_query(texts, convert_to_sparse_tensor=False)
        calls = front.counts.calls
        answer = ask(front, texts, input_type="query")
        assert_equal(answer, theirs)
        assert front.counts.calls == calls, "queries need no engine"
        assert not answer["truncated"].any()
        theirs = library.encode_document(texts, convert_to_sparse_tensor=False)
        assert_equal(ask(front, texts, input_type="document"), theirs)
        assert_equal(ask(front, texts), theirs)


def test_router_answers_queries_and_documents_of_one_batch(router: Path, tmp_path: Path) -> None:
    front, library = pytorch_front(router, tmp_path / "front"), SparseEncoder(str(router), device="cpu")
    requests = [
        {
            "text_input": np.array([[text.encode()]], np.object_),
            "input_type": np.array([[(b"query", b"document")[index % 2]]], np.object_),
        }
        for index, text in enumerate(TEXTS)
    ]
    for index, (answer, text) in enumerate(zip(front(requests), TEXTS, strict=True)):
        encode = library.encode_document if index % 2 else library.encode_query
        assert_equal(answer, encode([text], convert_to_sparse_tensor=False))


def test_router_refuses_empty_texts_and_other_types(router: Path, tmp_path: Path) -> None:
    front = pytorch_front(router, tmp_path / "front")
    assert isinstance(ask(front, [""], input_type="query"), InputError)
    assert "expected one of query, document" in str(ask(front, ["a"], input_type="passage"))


def test_router_cuts_queries_only_when_asked_to(copy: Path, tmp_path: Path) -> None:
    edit(copy / "query_0_SparseStaticEmbedding" / "tokenizer_config.json", model_max_length=4)
    front, library = pytorch_front(copy, tmp_path / "front"), SparseEncoder(str(copy), device="cpu")
    assert "the limit of a query of this model is 4" in str(ask(front, TEXTS[-1:], input_type="query"))
    answer = ask(front, TEXTS[-2:], input_type="query", truncate=True)
    assert answer["truncated"].ravel().tolist() == [True, True]
    assert answer["prompt_tokens"].ravel().tolist() == [4, 4]
    assert_equal(answer, library.encode_query(TEXTS[-2:], convert_to_sparse_tensor=False))


def test_router_puts_the_prompt_of_its_type_before_texts(copy: Path, tmp_path: Path) -> None:
    edit(copy / "config_sentence_transformers.json", prompts={"query": "museum: ", "document": "fox: "})
    front, library = pytorch_front(copy, tmp_path / "front"), SparseEncoder(str(copy), device="cpu")
    assert_equal(ask(front, TEXTS, input_type="query"), library.encode_query(TEXTS, convert_to_sparse_tensor=False))
    assert_equal(
        ask(front, TEXTS, input_type="document"), library.encode_document(TEXTS, convert_to_sparse_tensor=False)
    )
    assert_equal(
        ask(front, TEXTS, input_type="query", prompt="train "),
        library.encode_query(TEXTS, prompt="train ", convert_to_sparse_tensor=False),
    )


def test_router_keeps_the_largest_weights(copy: Path, tmp_path: Path) -> None:
    edit(copy / "config_sentence_transformers.json", max_active_dims=3)
    front, library = pytorch_front(copy, tmp_path / "front"), SparseEncoder(str(copy), device="cpu")
    assert_equal(ask(front, TEXTS, input_type="query"), library.encode_query(TEXTS, convert_to_sparse_tensor=False))
    assert_equal(ask(front, TEXTS), library.encode_document(TEXTS, convert_to_sparse_tensor=False))


@pytest.mark.parametrize(
    ("parameters", "default"),
    [
        ({"default_route": "query"}, "query"),
        ({"default_route": None, "allow_empty_key": True}, "query"),
        ({"default_route": None, "allow_empty_key": False}, None),
    ],
)
def test_router_without_a_type_takes_the_route_of_the_library(
    parameters: dict[str, Any], default: str | None, copy: Path, tmp_path: Path
) -> None:
    edit(copy / "router_config.json", parameters=parameters)
    front, library = pytorch_front(copy, tmp_path / "front"), SparseEncoder(str(copy), device="cpu")
    if default is None:
        assert "send input_type" in str(ask(front, TEXTS))
        with pytest.raises(ValueError, match="Could not determine route"):
            library.encode(TEXTS)
    else:
        assert_equal(ask(front, TEXTS), library.encode(TEXTS, convert_to_sparse_tensor=False))


def test_router_of_other_modules_is_refused(copy: Path) -> None:
    config = json.loads((copy / "router_config.json").read_text())
    edit(copy / "router_config.json", structure={**config["structure"], "query": ["document_0_Transformer"]})
    with pytest.raises(
        CheckpointError, match=r"has the routes query: Transformer; document: .*; expected query: Sparse"
    ):
        read_modules(copy)
    edit(copy / "router_config.json", structure={"query": ["elsewhere"]})
    with pytest.raises(CheckpointError, match=r"a route of router_config\.json is \['elsewhere'\]; expected names"):
        read_modules(copy)
    edit(
        copy / "router_config.json", types={"../x": "sentence_transformers.Transformer"}, structure={"query": ["../x"]}
    )
    with pytest.raises(CheckpointError, match=r"a module at \.\./x; expected the name of a folder"):
        read_modules(copy)
    edit(copy / "router_config.json", types={"x": "custom.Code"}, structure={"query": ["x"]})
    with pytest.raises(CheckpointError, match=r"a module custom\.Code at place 'x' of router_config\.json"):
        read_modules(copy)


def test_router_of_dense_embeddings_is_refused_by_name(copy: Path) -> None:
    edit(copy / "config_sentence_transformers.json", model_type="SentenceTransformer")
    with pytest.raises(CheckpointError, match="with a Router, which is supported for a SparseEncoder alone; save each"):
        read_modules(copy)


def test_router_table_in_a_pickle_is_refused(copy: Path) -> None:
    (copy / "query_0_SparseStaticEmbedding" / "model.safetensors").rename(copy / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"has no model\.safetensors with the weights of its tokens"):
        read_modules(copy)


def test_router_with_another_tokenizer_for_queries_is_refused(copy: Path) -> None:
    path = copy / "query_0_SparseStaticEmbedding" / "tokenizer.json"
    document = json.loads(path.read_text())
    edit(path, normalizer={**document["normalizer"], "lowercase": not document["normalizer"]["lowercase"]})
    checkpoint = resolve(make_spec(model=str(copy)))
    with pytest.raises(CheckpointError, match="reads queries with another tokenizer than documents"):
        encoder_task(checkpoint.task).parameters(checkpoint)
