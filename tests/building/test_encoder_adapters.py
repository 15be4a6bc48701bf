"""Adapters of a built encoder: added, replaced and removed while it is served, equal to PyTorch alone and mixed."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoTokenizer, PreTrainedModel

from builder.building.adapters import add_adapter
from builder.building.pipeline import build
from builder.building.verify.recording import graph_case
from builder.building.verify.replay import load_module, replay_graph
from builder.building.verify.runtimes import difference
from builder.checkpoints.linear_layers import linear_layers
from builder.checkpoints.lora import WEIGHTS, merged, read_lora
from builder.common.errors import BuilderError, CheckpointError, ExportError, RepositoryError, VerificationError
from builder.graphs.export import encoder
from builder.graphs.export.lora import adaptable_layers, drop_unread_stacks
from builder.graphs.onnx.graph import read_graph
from builder.options import make_spec
from builder.repository.adapters import read_adapters, remove_adapter
from builder.repository.check import check
from builder.repository.sharing.share import share
from builder.runtime.adapter_files import ALL_ADAPTERS
from builder.runtime.encoder.front import open_front
from builder.runtime.encoder.pipeline import Pipeline
from builder.runtime.fields import InputError
from builder.runtime.lora import LORA_A, LORA_ROWS
from builder.serving.plan.needs import published
from builder.serving.plan.unbuilt import needs_of_checkpoint
from tests.embedders import make_embedder
from tests.lora import AdaptedModel, save_lora
from tests.tiny_encoders import make_checkpoint

TEXTS = ("The museum in Oslo opens at nine", "A text", "Rain is expected in the north tomorrow, and snow in the hills")
CLOSE: dict[str, Any] = {"rtol": 0, "atol": 2e-5}
OPTIONS: dict[str, Any] = {"pooling": "cls", "adapters": 2, "adapter_rank": 4}


class Built(AdaptedModel):
    """Encoder that takes two adapters of rank 4, its checkpoint, and three adapters in PEFT's files."""

    def expected(self, source: str, texts: Sequence[str]) -> np.ndarray:
        """Return transformers' first vector of each text with the adapter merged into the checkpoint."""
        model: PreTrainedModel = AutoModel.from_pretrained(self.checkpoint)
        adapter = read_lora(str(self.saved[source]), linear_layers(model), 4) if source else None
        tokenizer = AutoTokenizer.from_pretrained(self.checkpoint)
        with merged(model, adapter) if adapter else nullcontext(), torch.no_grad():
            vectors = [model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0, 0] for text in texts]
        return np.stack([vector.numpy() for vector in vectors])


@pytest.fixture(scope="module")
def built(module_folder: Callable[[str], Path]) -> Built:
    folder = module_folder("encoder-adapters")
    checkpoint = make_checkpoint(folder / "checkpoint", "bert", "feature-extraction")
    build(make_spec(model=str(checkpoint), name="m", output=folder / "repository", **OPTIONS))
    model = AutoModel.from_pretrained(checkpoint)
    saved = {
        "a": save_lora(folder / "a", model, ("query", "value"), seed=1),
        "b": save_lora(folder / "b", model, ("dense",), rank=2, seed=2),  # the pooler's too, which no answer reads
        "c": save_lora(folder / "c", model, ("key", "query"), seed=3),
    }
    return Built(folder / "repository", checkpoint, saved)


@pytest.fixture
def clean(built: Built) -> Built:
    """Return the built model without adapters."""
    built.remove_all()
    return built


def opened(built: Built) -> Pipeline:
    return open_front(built.repository / "m" / "1")


def request(adapter: str, *texts: str) -> dict[str, np.ndarray]:
    tensors = {"text_input": np.array([[text] for text in texts], object)}
    return {**tensors, "lora_name": np.array([[adapter]] * len(texts), object)} if adapter else tensors


def embeddings(front: Pipeline, *requests: dict[str, np.ndarray]) -> list[np.ndarray]:
    """Return the embeddings of each request of one batch; raise the error of one that has none."""
    answers = []
    for answer in front(requests):
        if isinstance(answer, Exception):
            raise answer
        answers.append(answer["embedding"])
    return answers


def test_adapters_change_while_the_encoder_is_served(clean: Built) -> None:
    """Added, used alone and beside others, replaced, removed: each with the next request, without a reload."""
    front = opened(clean)
    np.testing.assert_allclose(embeddings(front, request("", *TEXTS))[0], clean.expected("", TEXTS), **CLOSE)
    with pytest.raises(InputError, match="lora_name is 'a', which is not an adapter of this model; it has none yet"):
        embeddings(front, request("a", TEXTS[0]))
    for name in clean.saved:
        clean.add(name)
    for name in ("a", "b", "c"):  # three where two answer at once
        np.testing.assert_allclose(embeddings(front, request(name, *TEXTS))[0], clean.expected(name, TEXTS), **CLOSE)
    clean.add("a", "c")
    np.testing.assert_allclose(embeddings(front, request("a", *TEXTS))[0], clean.expected("c", TEXTS), **CLOSE)
    remove_adapter(clean.repository, "m", "b")
    known, unknown = front([request("c", TEXTS[0]), request("b", TEXTS[0])])
    assert isinstance(known, dict)
    assert "'b', which is not an adapter of this model; it has a, c" in str(unknown)


def test_rows_of_different_adapters_share_a_call(clean: Built) -> None:
    front = opened(clean)
    for name in clean.saved:
        clean.add(name)
    assert not np.allclose(clean.expected("a", TEXTS), clean.expected("", TEXTS), atol=0.1)
    before = front.counts.calls
    names: tuple[str, ...] = ("a", "", "b", "a")
    together = embeddings(front, *(request(name, TEXTS[0]) for name in names))
    assert front.counts.calls == before + 1
    for name, answer in zip(names, together, strict=True):
        np.testing.assert_allclose(answer, clean.expected(name, TEXTS[:1]), **CLOSE)
    names = ("c", "a", "b", "", "c")  # of more adapters than a call takes
    together = embeddings(front, *(request(name, *TEXTS) for name in names))
    for name, answer in zip(names, together, strict=True):
        np.testing.assert_allclose(answer, clean.expected(name, TEXTS), **CLOSE)


def test_encoder_lists_its_adapters(clean: Built) -> None:
    front = opened(clean)
    clean.add("a")
    clean.add("c")
    listed, answer = front([request(ALL_ADAPTERS, "-"), request("a", TEXTS[0])])
    assert isinstance(listed, dict)
    assert json.loads(listed["tokens"][0, 0]) == ["a", "c"]
    assert isinstance(answer, dict)


def test_one_request_has_one_adapter(clean: Built) -> None:
    clean.add("a")
    tensors = {**request("", *TEXTS[:2]), "lora_name": np.array([["a"], [""]], object)}
    with pytest.raises(InputError, match="lora_name differs between the rows of one request"):
        embeddings(opened(clean), tensors)


def test_check_report_and_plan_know_an_encoder_with_adapters(clean: Built) -> None:
    clean.add("a")
    assert check(clean.repository) == []
    about = read_adapters(clean.repository, "m")["a"]
    assert (about.rank, about.base, about.agreement) == (4, "org/base", None)
    assert about.error is not None
    assert about.error < 1e-5
    layers = linear_layers(AutoModel.from_pretrained(clean.checkpoint))
    size = 4 * (3 + 2) * 4 * sum(one.inputs + one.outputs for one in layers.values())  # stacks, and adapters as read
    report = json.loads((clean.repository / "m" / "1" / "build.json").read_text())
    assert report["memory"]["adapters"] == size
    assert published(clean.repository, "m").weights == size + report["ladder"][1]["size"]
    specs = [make_spec(model=str(clean.checkpoint), name="m", **options) for options in (OPTIONS, {"pooling": "cls"})]
    planned = [needs_of_checkpoint(spec).weights for spec in specs]
    assert planned[0] == planned[1] + size


def test_add_to_an_encoder_compares_with_its_checkpoint(clean: Built, tmp_path: Path) -> None:
    other = make_checkpoint(tmp_path / "other", "bert", "feature-extraction", initializer_range=0.1)
    with pytest.raises(CheckpointError, match="other weights than the checkpoint that m was built from"):
        add_adapter(clean.repository, "m", "a", str(clean.saved["a"]), str(other))
    assert add_adapter(clean.repository, "m", "a", str(clean.saved["a"])).verified is None


def test_add_to_an_encoder_refuses_wrong_answers(clean: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builder.building.adapters.merged", lambda model, adapter: nullcontext())
    with pytest.raises(VerificationError, match="the answers with the adapter are off by"):
        clean.add("a")
    assert read_adapters(clean.repository, "m") == {}


def test_adapter_of_layers_that_no_answer_reads_is_refused(clean: Built, tmp_path: Path) -> None:
    saved = save_lora(tmp_path / "pooler", AutoModel.from_pretrained(clean.checkpoint), ("dense",))
    matrices = load_file(saved / WEIGHTS)
    save_file({name: matrix for name, matrix in matrices.items() if ".pooler." in name}, saved / WEIGHTS)
    with pytest.raises(CheckpointError, match=r"changes pooler\. alone, which no answer of this task reads"):
        add_adapter(clean.repository, "m", "a", str(saved), str(clean.checkpoint))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"engine": "openvino", "precision": "fp16"}, "--engine onnxruntime with --precision fp32"),
        ({"executor": "bls"}, "--engine onnxruntime with --precision fp32, in process on the CPU"),
        ({"precision": "int8"}, "--engine onnxruntime with --precision fp32, in process on the CPU"),
        ({"target": "cuda"}, "--engine onnxruntime with --precision fp32, in process on the CPU"),
        ({"level": "O3"}, "--adapters does not go with --level O3"),
        ({"prune": 0.25}, "--adapters does not go with --prune"),
        ({"late_chunking": True}, "--adapters does not go with --late-chunking"),
        ({"adapter_labels": 3}, "--adapter-labels is for classification; feature-extraction has no labels"),
        ({"serving": {"response_cache": True}}, "--adapters does not go with serving.response_cache"),
        ({"adapters": 512, "adapter_rank": 512, "machine": {"memory_gb": 1}}, "the adapters need .* lower --adapters"),
        ({"adapter_layers": "query,nothing"}, "names nothing, which adapters cannot change; .* dense, key"),
    ],
)
def test_build_refuses_encoder_adapters_by_name(
    built: Built, options: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(BuilderError, match=reason):
        build(make_spec(model=str(built.checkpoint), output=tmp_path / "out", **{**OPTIONS, **options}))
    assert not (tmp_path / "out").exists()


def test_build_refuses_adapters_of_an_own_graph(built: Built, tmp_path: Path) -> None:
    graph = built.repository / "m" / "1" / "model.onnx"
    with pytest.raises(BuilderError, match="--adapters does not go with --graph"):
        build(make_spec(model=str(built.checkpoint), output=tmp_path / "out", graph=graph, **OPTIONS))


def test_build_refuses_adapters_of_a_model_with_none_of_their_layers(tmp_path: Path) -> None:
    """Regression: a SqueezeBERT answered with the base model's embeddings under the name of an adapter."""
    checkpoint = make_checkpoint(tmp_path / "checkpoint", "squeezebert", "feature-extraction")
    with pytest.raises(ExportError, match=r"\(squeezebert\): adapters can change none of its layers"):
        build(make_spec(model=str(checkpoint), output=tmp_path / "out", adapters=1))


def test_export_refuses_adapters_that_no_answer_reads() -> None:
    value = partial(onnx.helper.make_tensor_value_info, elem_type=onnx.TensorProto.FLOAT, shape=[2])
    nodes = [onnx.helper.make_node("Add", ["input_ids", f"{LORA_A}query"], ["y"])]
    names = ("input_ids", LORA_ROWS, f"{LORA_A}query", f"{LORA_A}dense")
    graph = onnx.helper.make_graph(nodes, "g", [value(name) for name in names], [value("y")])
    drop_unread_stacks(graph)
    assert [one.name for one in graph.input] == ["input_ids", f"{LORA_A}query"]
    del graph.node[:]
    with pytest.raises(ExportError, match="adapters can change none of its layers"):
        drop_unread_stacks(graph)


def test_adaptable_layers_of_a_failing_model_are_an_export_error(
    built: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(model: PreTrainedModel) -> None:
        raise IndexError("no such position")

    monkeypatch.setattr(encoder, "adaptable_layers", fail)
    with pytest.raises(ExportError, match=r"\(bert\): IndexError: no such position"):
        build(make_spec(model=str(built.checkpoint), output=tmp_path / "out", adapters=1))


def test_build_refuses_adapters_of_other_encoder_tasks(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "checkpoint", "bert", "fill-mask")
    with pytest.raises(BuilderError, match=r"--adapters is for text generation, embeddings, .*; fill-mask takes none"):
        build(make_spec(model=str(checkpoint), output=tmp_path / "out", adapters=1))


def test_shared_front_refuses_an_encoder_with_adapters(built: Built) -> None:
    with pytest.raises(RepositoryError, match="m was built with --adapters"):
        share(built.repository, "front", ["m"])


@pytest.mark.parametrize("model_type", ["distilbert", "modernbert", "deberta-v2", "qwen3"])
def test_architectures_answer_as_pytorch_with_an_adapter(model_type: str, tmp_path: Path) -> None:
    """Compare, as `add_adapter` does, with an adapter of every layer that it may change."""
    if model_type == "qwen3":
        checkpoint = make_embedder(tmp_path / "checkpoint", model_type, "lasttoken")
    else:
        checkpoint = make_checkpoint(tmp_path / "checkpoint", model_type, "feature-extraction")
    build(make_spec(model=str(checkpoint), name="m", output=tmp_path, adapters=1, adapter_rank=4))
    model = AutoModel.from_pretrained(checkpoint)
    layers = {name.rpartition(".")[2] for name in adaptable_layers(model)}
    saved = save_lora(tmp_path / "all", model, sorted(layers), size=0.1)
    about = add_adapter(tmp_path, "m", "all", str(saved), str(checkpoint))
    assert about.error is not None
    assert 0 < about.error < 1e-4


def test_layers_that_read_positions_too_take_no_adapters(tmp_path: Path) -> None:
    """DeBERTa applies the layers of queries and keys to positions, which have no rows."""
    make_checkpoint(tmp_path, "deberta-v2", "feature-extraction")
    layers = {name.rpartition(".")[2] for name in adaptable_layers(AutoModel.from_pretrained(tmp_path))}
    assert "value_proj" in layers
    assert not {"query_proj", "key_proj"} & layers


def test_other_versions_of_the_engine_repeat_its_calls(built: Built) -> None:
    graph = read_graph(built.repository / "m" / "1" / "model.onnx")
    case = graph_case(graph, [{name: np.ones((2, 4), np.int64) for name in graph.token_inputs}], threads=1)
    answers = replay_graph(load_module(case.job["opener"]), dict(case.job))
    assert difference(case.answers, answers) <= case.tolerance


def test_encoder_without_adapters_refuses_them(built: Built, tmp_path: Path) -> None:
    build(make_spec(model=str(built.checkpoint), name="m", output=tmp_path, pooling="cls"))
    with pytest.raises(RepositoryError, match="m was built without --adapters: build it again with --adapters N"):
        add_adapter(tmp_path, "m", "a", str(built.saved["a"]))
