"""Tables of sentence-transformers and of model2vec are read, and served without a network, as their libraries do."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from sentence_transformers import SentenceTransformer

from builder import build
from builder.checkpoints.resolve import describe, resolve
from builder.checkpoints.tasks.base import encoder_task
from builder.common.errors import CheckpointError, SpecError
from builder.common.tensors import to_tensors
from builder.options import make_spec
from builder.repository.report.record import read_report
from builder.runtime.encoder.front import open_front
from builder.runtime.encoder.pipeline import Pipeline
from tests.static_embeddings import MODEL2VEC, PROMPTS, SIZE, make_model2vec, make_static

TEXTS = ["the train leaves at nine", "Zürich 東京 – the naïve 🚆 café", "🚆", "\u200b", "the soup of the day " * 60]
GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "model2vec.json").read_text("utf-8"))


@pytest.fixture(scope="module")
def static(module_folder: Callable[[str], Path]) -> Path:
    return make_static(module_folder("static") / "table", truncate_dim=20)


@pytest.fixture(scope="module")
def models(module_folder: Callable[[str], Path]) -> Path:
    return module_folder("models")


@pytest.fixture(scope="module")
def front(static: Path, models: Path) -> Pipeline:
    return built(static, models)


def built(checkpoint: Path, folder: Path, **options: Any) -> Pipeline:
    """Build `checkpoint` into `folder`, and return the emitted front."""
    report = build(make_spec(model=str(checkpoint), name="table", output=folder, **options))
    assert report.verified
    return open_front(folder / "table" / "1")


def ask(front: Pipeline, texts: list[str], **options: Any) -> Any:
    """Return the answer to one request of several texts, or the error."""
    inputs = front.task.inputs(front.serving.parameters)
    tensors = to_tensors({"text_input": "", **options}, inputs)
    tensors = {name: np.repeat(value, len(texts), axis=0) for name, value in tensors.items()}
    tensors["text_input"] = np.array([[text.encode()] for text in texts], np.object_)
    (answer,) = front([tensors])
    assert isinstance(answer, dict), answer
    return answer


@pytest.mark.parametrize("options", [{}, {"prompt_name": "query"}, {"prompt": "say: "}])
def test_table_of_sentence_transformers_is_served_as_there(
    options: dict[str, Any], static: Path, front: Pipeline
) -> None:
    library = SentenceTransformer(str(static), device="cpu")
    together = ask(front, TEXTS, **options)
    np.testing.assert_allclose(together["embedding"], library.encode(TEXTS, **options), atol=1e-6)
    for row, text in enumerate(TEXTS):
        np.testing.assert_allclose(ask(front, [text], **options)["embedding"][0], together["embedding"][row], atol=1e-6)


def test_text_without_tokens_has_the_vector_zero(static: Path, front: Pipeline) -> None:
    answer = ask(front, [TEXTS[0], "\u200b"])
    tokens = SentenceTransformer(str(static), device="cpu").tokenizer.encode(TEXTS[0], add_special_tokens=False).ids
    assert answer["prompt_tokens"].tolist() == [[len(tokens)], [0]]
    assert answer["embedding"][0].any()
    assert not answer["embedding"][1].any()


def test_dimensions_of_a_table_are_cut_then_normalised(static: Path, front: Pipeline) -> None:
    library = SentenceTransformer(str(static), device="cpu")
    expected = library.encode(TEXTS[:3], truncate_dim=7, normalize_embeddings=True)
    np.testing.assert_allclose(ask(front, TEXTS[:3], dimensions=7)["embedding"], expected, atol=1e-6)


def test_front_of_a_table_has_no_graph_and_no_engine(front: Pipeline, models: Path) -> None:
    version = models / "table" / "1"
    assert (front.serving.executor, front.serving.model) == ("numpy", "table.json")
    assert sorted(file.name for file in version.glob("table*")) == ["table.json", "table.npy"]
    assert not (version / "sessions.py").exists()
    report = read_report(models, "table")
    assert (report.chosen, report.engine, report.task) == ("fp32", "numpy", "sentence-similarity")
    measured = report.variants[-1]
    assert measured.quality is not None
    assert measured.quality > 0.999999


@pytest.mark.parametrize(("precision", "least", "share"), [("fp16", 0.99999, 0.5), ("int8", 0.999, 0.3)])
def test_table_is_stored_in_fewer_bits(
    precision: str, least: float, share: float, static: Path, front: Pipeline, tmp_path: Path
) -> None:
    smaller = built(static, tmp_path, precision=precision)
    exact, rounded = (ask(one, TEXTS[:3])["embedding"] for one in (front, smaller))
    cosines = (exact * rounded).sum(axis=1) / np.linalg.norm(exact, axis=1) / np.linalg.norm(rounded, axis=1)
    assert cosines.min() > least
    fp32, stored = read_report(tmp_path, "table").variants[1:]
    assert stored.size < (share + 0.05) * fp32.size
    assert read_report(tmp_path, "table").chosen == precision


@pytest.mark.parametrize("form", MODEL2VEC)
def test_checkpoint_of_model2vec_is_read_as_model2vec_reads_it(form: str, tmp_path: Path) -> None:
    """Mappings, factors and types of the table; unknown tokens do not count, and long texts are cut on request."""
    checkpoint = make_model2vec(tmp_path / form, form)
    front = built(checkpoint, tmp_path / "models", truncate=True)
    answer = ask(front, GOLDEN["texts"])
    np.testing.assert_allclose(answer["embedding"], GOLDEN["embeddings"][form], atol=2e-3 if form == "half" else 1e-6)
    assert answer["truncated"].any() == (form == "shared")
    assert front.task.max_length == {"plain": 512, "half": 8192, "shared": 12}[form]


def test_checkpoint_of_model2vec_without_modules_is_the_same(tmp_path: Path) -> None:
    first, second = (make_model2vec(tmp_path / name, "plain") for name in ("with", "without"))
    (second / "modules.json").unlink()
    one, other = (resolve(make_spec(model=str(folder))) for folder in (first, second))
    for text in TEXTS[:2]:
        answers = [encoder_task(each.task).reference(each, {"text_input": text}) for each in (one, other)]
        assert answers[0] == answers[1]


def test_table_without_unknown_tokens_equals_sentence_transformers(tmp_path: Path) -> None:
    checkpoint = make_model2vec(tmp_path / "plain", "plain")
    resolved = resolve(make_spec(model=str(checkpoint)))
    expected = SentenceTransformer(str(checkpoint), device="cpu").encode(TEXTS[0])
    answer = encoder_task(resolved.task).reference(resolved, {"text_input": TEXTS[0]})
    np.testing.assert_allclose(answer["embedding"], expected, atol=1e-6)


def test_tokens_at_which_the_tokenizer_cuts_are_the_limit(tmp_path: Path) -> None:
    checkpoint = resolve(make_spec(model=str(make_static(tmp_path / "table", length=30))))
    assert checkpoint.max_length == 30
    assert describe(make_spec(model=str(tmp_path / "table")).source).model.table.weight.shape[1] == SIZE


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"engine": "openvino"}, "--engine is for models with a graph; table is a table of vectors"),
        ({"executor": "bls"}, "--executor is for models with a graph"),
        ({"precision": "bf16"}, "no --precision bf16; it has fp32, fp16, int8"),
        ({"precision": "auto"}, "no --precision auto"),
        ({"pooling": "max"}, "a table has the mean alone"),
        ({"task": "fill-mask", "max_length": 64}, "serves sentence-similarity and feature-extraction, not fill-mask"),
    ],
)
def test_options_that_a_table_lacks_are_refused(
    options: dict[str, Any], message: str, static: Path, tmp_path: Path
) -> None:
    with pytest.raises((SpecError, CheckpointError), match=message):
        build(make_spec(model=str(static), output=tmp_path, **options))


def test_damaged_tables_are_refused(tmp_path: Path) -> None:
    checkpoint = make_model2vec(tmp_path / "shared", "shared")
    weights = checkpoint / "model.safetensors"
    tensors = load_file(weights)
    for wrong, message in (
        ({**tensors, "mapping": tensors["mapping"] + 1000}, "mapping of shared does not name rows"),
        ({**tensors, "mapping": np.array(3)}, r"mapping of .*shared has the shape \[\]; expected one"),
        ({**tensors, "mapping": tensors["mapping"][:, None]}, r"mapping of .*shared has the shape \[\d+, 1\]"),
        ({**tensors, "mapping": tensors["mapping"][:0]}, r"mapping of .*shared has the shape \[0\]"),
        (
            {**tensors, "mapping": np.full(len(tensors["mapping"]), np.nan, np.float32)},
            "mapping of shared is torch.float32",
        ),
        ({**tensors, "weights": tensors["weights"][:5]}, "weights for a table of"),
        ({"mapping": tensors["mapping"]}, "has mapping; expected embedding.weight or embeddings"),
        ({**tensors, "embeddings": np.full((40, SIZE), np.nan, np.float32)}, "not finite"),
        ({**tensors, "mapping": tensors["mapping"][:9]}, "they do not belong together"),
    ):
        save_file(wrong, weights)
        with pytest.raises(CheckpointError, match=message):
            resolve(make_spec(model=str(checkpoint)))
    weights.write_bytes(b"version https://git-lfs")
    with pytest.raises(CheckpointError, match="pointer of Git LFS"):
        resolve(make_spec(model=str(checkpoint)))
    weights.unlink()
    with pytest.raises(CheckpointError, match="safetensors"):
        resolve(make_spec(model=str(checkpoint)))


def test_dense_layer_after_a_table_is_refused_by_name(static: Path, tmp_path: Path) -> None:
    modules = json.loads((static / "modules.json").read_text())
    modules[1]["type"] = "sentence_transformers.models.Dense"
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(CheckpointError, match=r"of StaticEmbedding, Dense; .* StaticEmbedding, then perhaps Normalize"):
        resolve(make_spec(model=str(tmp_path)))


def test_prompts_of_a_table_are_declared(front: Pipeline) -> None:
    assert front.serving.parameters["prompts"] == PROMPTS
