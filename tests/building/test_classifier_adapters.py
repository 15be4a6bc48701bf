"""Adapters of a classifier: each with its own head and its own labels, equal to transformers alone and mixed."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification, PreTrainedModel

from builder.building.adapters import add_adapter
from builder.building.pipeline import build
from builder.checkpoints.linear_layers import body_layers, head_layers, linear_layers
from builder.checkpoints.lora import PREFIX, WEIGHTS, merged, read_lora
from builder.checkpoints.resolve import resolve
from builder.checkpoints.tasks.base import encoder_task
from builder.common.errors import BuilderError, CheckpointError
from builder.options import make_spec
from builder.repository.adapters import read_adapters, remove_adapter
from builder.repository.check import check
from builder.runtime.adapter_files import read_adapter
from builder.runtime.encoder.front import open_front
from builder.runtime.encoder.pipeline import Pipeline
from builder.runtime.fields import InputError
from builder.runtime.lora import LORA_HEAD, LoraStacks
from builder.serving.plan.needs import published
from builder.serving.plan.unbuilt import needs_of_checkpoint
from tests.lora import AdaptedModel, save_lora
from tests.rerankers import make_classifying_reranker, make_reranker
from tests.tiny_encoders import make_checkpoint

TEXTS = ("The museum in Oslo opens at nine", "A text", "Rain is expected in the north tomorrow, and snow in the hills")
TEXT, TOKEN = "text-classification", "token-classification"
MODELS = {TEXT: AutoModelForSequenceClassification, TOKEN: AutoModelForTokenClassification}
LABELS = {"a": 3, "b": 2, "c": 5, "d": 1}  # of each adapter
NAMED = {"0": "angry", "1": "calm", "2": "glad"}  # by the configuration beside the adapter a
OPTIONS: dict[str, Any] = {"name": "m", "adapters": 2, "adapter_rank": 4}


@dataclass(frozen=True)
class Built(AdaptedModel):
    """Classifier `m` of `task` that takes two adapters of up to five labels, and four adapters in PEFT's files."""

    task: str

    def expected(self, source: str, text: str, **options: Any) -> Any:
        """Return the answer of transformers' pipeline with the adapter merged and its head in place of the model's."""
        names = {"id2label": {int(index): name for index, name in NAMED.items()}}
        labels = {} if not source else names if source == "a" else {"num_labels": LABELS[source]}
        model = MODELS[self.task].from_pretrained(self.checkpoint, **labels, ignore_mismatched_sizes=True).eval()
        tokenizer = transformers.AutoTokenizer.from_pretrained(self.checkpoint)
        pipeline = transformers.pipeline(self.task, model=model, tokenizer=tokenizer, device="cpu")
        if not source:
            return pipeline(text, **options)
        weights = load_file(self.saved[source] / WEIGHTS)
        own = {name.removeprefix(PREFIX): values for name, values in weights.items() if ".lora_" not in name}
        assert not model.load_state_dict(own, strict=False).unexpected_keys
        adapter = read_lora(str(self.saved[source]), linear_layers(model), 4, heads=head_layers(model))
        with merged(model, replace(adapter, head={})):
            return pipeline(text, **options)


def make_built(folder: Path, task: str, base_task: str) -> Built:
    checkpoint = make_checkpoint(folder / "checkpoint", "bert", base_task)
    build(make_spec(model=str(checkpoint), task=task, output=folder / "repository", adapter_labels=5, **OPTIONS))
    model = MODELS[task].from_pretrained(checkpoint)
    targets = {"a": ("query", "value"), "b": ("dense",), "c": ("key",), "d": ("query",)}
    saved = {
        name: save_lora(folder / name, model, targets[name], seed=seed, labels=labels)
        for seed, (name, labels) in enumerate(LABELS.items())
    }
    (saved["a"] / "config.json").write_text(json.dumps({"model_type": "bert", "id2label": NAMED}))
    return Built(folder / "repository", checkpoint, saved, task)


@pytest.fixture(scope="module")
def headless(module_folder: Callable[[str], Path]) -> Built:
    """Return a classifier of texts whose checkpoint has no head: a pretrained BERT with adapters alone."""
    return make_built(module_folder("headless-adapters"), TEXT, "feature-extraction")


@pytest.fixture(scope="module")
def tagger(module_folder: Callable[[str], Path]) -> Built:
    """Return a classifier of tokens whose checkpoint has a head of two labels."""
    return make_built(module_folder("tagger-adapters"), TOKEN, TOKEN)


def request(adapter: str, texts: tuple[str, ...] = TEXTS, **options: Any) -> dict[str, np.ndarray]:
    rows = {"text_input": list(texts), **{name: [value] * len(texts) for name, value in options.items()}}
    if adapter:
        rows["lora_name"] = [adapter] * len(texts)
    return {
        name: np.array([[v] for v in values], np.int32 if name == "top_k" else object) for name, values in rows.items()
    }


def answered(front: Pipeline, *requests: dict[str, np.ndarray]) -> list[dict[str, np.ndarray]]:
    """Return the answer to each request of one batch; raise the error of one that has none."""
    answers = []
    for answer in front(requests):
        if isinstance(answer, Exception):
            raise answer
        answers.append(answer)
    return answers


def assert_labels_are_expected(built: Built, source: str, answer: dict[str, np.ndarray]) -> None:
    for row, text in enumerate(TEXTS[: len(answer["label"])]):
        expected = built.expected(source, text, top_k=9)
        assert [label.decode() for label in answer["label"][row]] == [one["label"] for one in expected]
        np.testing.assert_allclose(answer["score"][row], [one["score"] for one in expected], rtol=0, atol=2e-6)


def test_adapters_with_heads_change_while_the_classifier_is_served(headless: Built) -> None:
    """Added, used alone and in one call, replaced, removed: each answers with its own labels."""
    headless.remove_all()
    front = open_front(headless.repository / "m" / "1")
    with pytest.raises(InputError, match="lora_name is missing: this model has no head but its adapters'; it has none"):
        answered(front, request(""))
    for name in LABELS:
        headless.add(name)
    before = front.counts.calls
    names = ("a", "c", "a")
    together = answered(front, *(request(name, TEXTS[:1], top_k=9) for name in names))
    assert front.counts.calls == before + 1
    assert [one["label"].shape for one in together] == [(1, 3), (1, 5), (1, 3)]
    four = answered(front, *(request(name, top_k=9) for name in LABELS))  # where two answer at once
    for name, answer in (*zip(names, together, strict=True), *zip(LABELS, four, strict=True)):
        assert_labels_are_expected(headless, name, answer)
    labels = [label.decode() for label in together[0]["label"][0]]
    assert sorted(labels) == sorted(NAMED.values())
    order = [list(NAMED.values()).index(label) for label in labels]
    np.testing.assert_array_equal(together[0]["class_scores"][0, order], together[0]["score"][0])
    headless.add("a", "b")
    assert_labels_are_expected(headless, "b", answered(front, request("a", top_k=9))[0])
    remove_adapter(headless.repository, "m", "b")
    with pytest.raises(InputError, match="'b', which is not an adapter of this model; it has a, c, d"):
        answered(front, request("b"))


def test_tokens_are_classified_by_the_labels_of_each_adapter(tagger: Built) -> None:
    """The checkpoint's own head answers requests without an adapter, in a call with others."""
    tagger.remove_all()
    front = open_front(tagger.repository / "m" / "1")
    for name in ("a", "c"):
        tagger.add(name)
    names = ("a", "", "c")
    options: dict[str, Any] = {"ignore_labels": "none", "aggregation_strategy": "simple"}
    before = front.counts.calls
    together = answered(front, *(request(name, TEXTS[:1], **options) for name in names))
    assert front.counts.calls == before + 1
    tasks = dict(front.tasks)
    apart = answered(front, *(request(name, **options) for name in names))
    assert dict(front.tasks) == tasks, "Regression: each request made the tables of its adapter's labels again"
    for name, answer in zip(names * 2, (*together, *apart), strict=True):
        for row, text in enumerate(TEXTS[: len(answer["entities"])]):
            expected = tagger.expected(name, text, ignore_labels=["none"], aggregation_strategy="simple")
            actual = json.loads(answer["entities"][row, 0])
            for one, other in zip(actual, expected, strict=True):
                assert one.pop("score") == pytest.approx(other.pop("score"), abs=2e-6)
                assert one == other


def test_check_report_and_plan_know_a_classifier_with_adapters(headless: Built) -> None:
    headless.remove_all()
    headless.add("a")
    assert check(headless.repository) == []
    assert "LABEL_0" not in (headless.repository / "m" / "config.pbtxt").read_text(), "of a head that does not answer"
    about = read_adapters(headless.repository, "m")["a"]
    assert about.error is not None
    assert 0 < about.error < 1e-5
    model = AutoModelForSequenceClassification.from_pretrained(headless.checkpoint)
    layers = list(body_layers(model).values())
    numbers = 4 * sum(one.inputs + one.outputs for one in layers) + (32 + 1) * 5
    size = 4 * (3 + 2) * numbers  # stacks, and adapters as read
    report = json.loads((headless.repository / "m" / "1" / "build.json").read_text())
    assert report["memory"]["adapters"] == size
    assert published(headless.repository, "m").weights == size + report["ladder"][1]["size"]
    common = {"model": str(headless.checkpoint), "task": TEXT, "adapter_labels": 5, **OPTIONS}
    assert needs_of_checkpoint(make_spec(**common)).weights == pytest.approx(
        size + report["ladder"][1]["size"], rel=0.1
    )


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"classifier.weight": None, "classifier.bias": None}, r"has the weights of classifier: .*\[\"classifier\"\]"),
        ({"classifier.weight": (3, 16)}, r"classifier.weight of shape \(3, 16\), and the model needs \(3, 32\)"),
        ({"classifier.weight": ()}, r"classifier.weight of shape \(\)"),
        ({"classifier.weight": (6, 32)}, "has 6 labels, and the model was built for at most 5: .*--adapter-labels 6"),
        ({"classifier.bias": (2,)}, "has 3 labels, and 2 in classifier.bias"),
        ({"bert.pooler.dense.weight": (32, 32)}, r"has the weight base_model.model.bert.pooler.dense.weight"),
    ],
)
def test_adapter_with_an_unusable_head_is_not_added(
    headless: Built, changes: dict[str, tuple[int, ...] | None], reason: str, tmp_path: Path
) -> None:
    headless.remove_all()
    saved = save_lora(tmp_path / "a", _classifier(headless), ("query",), labels=3)
    weights = load_file(saved / WEIGHTS)
    for name, shape in changes.items():
        weights.pop(f"{PREFIX}{name}", None)
        if shape is not None:
            weights[f"{PREFIX}{name}"] = torch.ones(shape)
    save_file(weights, saved / WEIGHTS)
    with pytest.raises(CheckpointError, match=reason):
        add_adapter(headless.repository, "m", "a", str(saved), str(headless.checkpoint))
    assert read_adapters(headless.repository, "m") == {}


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        ({"0": "no", "1": "yes"}, "id2label of config.json names 2 labels .* the head has 3 outputs"),
        ({"²": "no"}, "expected names by number"),  # isdigit, but not a number
        (["no", "yes"], r"has the id2label \[\"no\", \"yes\"\]; expected names by number"),
    ],
)
def test_labels_of_another_head_are_refused(headless: Built, names: Any, reason: str, tmp_path: Path) -> None:
    saved = save_lora(tmp_path / "a", _classifier(headless), ("query",), labels=3)
    (saved / "config.json").write_text(json.dumps({"id2label": names}))
    with pytest.raises(CheckpointError, match=reason):
        add_adapter(headless.repository, "m", "a", str(saved), str(headless.checkpoint))


def test_head_with_numbers_that_are_not_finite_is_refused(headless: Built, tmp_path: Path) -> None:
    saved = save_lora(tmp_path / "a", _classifier(headless), ("query",), labels=3, size=float("inf"))
    with pytest.raises(CheckpointError, match=r"numbers in classifier.weight that are not finite"):
        add_adapter(headless.repository, "m", "a", str(saved), str(headless.checkpoint))


def test_adapter_of_a_classifier_needs_its_checkpoint(headless: Built) -> None:
    with pytest.raises(CheckpointError, match=r"an adapter of m, a classifier, .* --base"):
        add_adapter(headless.repository, "m", "a", str(headless.saved["a"]))


def test_adapter_without_a_head_keeps_that_of_the_checkpoint(tagger: Built, tmp_path: Path) -> None:
    tagger.remove_all()
    model = AutoModelForTokenClassification.from_pretrained(tagger.checkpoint)
    saved = save_lora(tmp_path / "a", model, ("query",))
    add_adapter(tagger.repository, "m", "a", str(saved), str(tagger.checkpoint))
    head = read_adapter(tagger.repository / "m" / "adapters" / "a.npz").matrices[f"{LORA_HEAD}classifier"]
    np.testing.assert_array_equal(head[:-1].T, model.classifier.weight.detach().numpy())


def test_stacks_refuse_heads_of_another_version(headless: Built) -> None:
    headless.remove_all()
    headless.add("c")
    adapter = read_adapter(headless.repository / "m" / "adapters" / "c.npz")
    shapes = {name: (3, *matrix.shape) for name, matrix in adapter.matrices.items()}
    assert LoraStacks(shapes).misfit(adapter) is None
    narrow = LoraStacks({**shapes, f"{LORA_HEAD}classifier": (3, 33, 2)})
    assert "it has 5 labels in classifier, and this version takes at most 2" in str(narrow.misfit(adapter))
    other = LoraStacks({**shapes, f"{LORA_HEAD}classifier": (3, 17, 5)})
    assert "its classifier has 32 numbers, and that of this version has 16" in str(other.misfit(adapter))
    more = LoraStacks({**shapes, f"{LORA_HEAD}classifier.dense": (3, 33, 32)})
    assert "it has no classifier.dense" in str(more.misfit(adapter))


@pytest.mark.parametrize("model_type", ["roberta", "deberta-v2", "modernbert"])
def test_heads_of_several_layers_answer_as_pytorch(model_type: str, tmp_path: Path) -> None:
    """Compare, as `add_adapter` does, with an adapter that replaces every layer after the encoder."""
    checkpoint = make_checkpoint(tmp_path / "checkpoint", model_type, TEXT)
    build(make_spec(model=str(checkpoint), output=tmp_path, **OPTIONS))
    model = AutoModelForSequenceClassification.from_pretrained(checkpoint)
    assert len(head_layers(model)) == 2
    targets = ("value", "value_proj", "Wqkv")
    saved = save_lora(tmp_path / "a", model, targets, labels=2, size=0.1)
    if model_type == "modernbert":  # whose dense layer has no bias
        weights = load_file(saved / WEIGHTS)
        del weights[f"{PREFIX}head.dense.bias"]
        save_file(weights, saved / WEIGHTS)
    about = add_adapter(tmp_path, "m", "a", str(saved), str(checkpoint))
    assert about.error is not None
    assert 0 < about.error < 1e-4


@pytest.mark.parametrize("kind", ["cross-encoder", "classifying decoder", "decoder"])
def test_rerankers_answer_as_the_library_with_an_adapter(kind: str, tmp_path: Path) -> None:
    """A decoder that scores tokens has no head of its own; others have one with a single label."""
    if kind == "cross-encoder":
        checkpoint = make_checkpoint(tmp_path / "checkpoint", "bert", TEXT, num_labels=1)
    else:
        make = make_reranker if kind == "decoder" else make_classifying_reranker
        checkpoint = make(tmp_path / "checkpoint", "qwen3")
    spec = make_spec(model=str(checkpoint), task="text-ranking", output=tmp_path, **OPTIONS)
    build(spec)
    loaded = resolve(spec)
    assert len(head_layers(loaded.model)) == (kind != "decoder")
    saved = save_lora(tmp_path / "a", loaded.model, ("query", "q_proj"), labels=int(kind != "decoder"))
    if kind == "classifying decoder":  # whose head has no bias
        weights = load_file(saved / WEIGHTS)
        del weights[f"{PREFIX}score.bias"]
        save_file(weights, saved / WEIGHTS)
    add_adapter(tmp_path, "m", "a", str(saved), str(checkpoint))
    sample = {"query": TEXTS[0], "documents": list(TEXTS[1:])}
    tensors = {"query": np.array([[TEXTS[0]]], object), "documents": np.array([TEXTS[1:]], object)}
    base, actual = answered(
        open_front(tmp_path / "m" / "1"), tensors, {**tensors, "lora_name": np.array([["a"]], object)}
    )
    task, heads = encoder_task(loaded.task), head_layers(loaded.model)
    assert base["score"][0] == pytest.approx(task.reference(loaded, sample)["score"], abs=2e-6)
    with merged(loaded.model, read_lora(str(saved), linear_layers(loaded.model), 4, heads=heads)):
        expected = task.reference(loaded, sample)
    assert actual["score"][0] == pytest.approx(expected["score"], abs=2e-6)
    assert not np.allclose(base["score"], actual["score"], atol=1e-3)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"task": "text-ranking", "adapter_labels": 1}, "--adapter-labels is for classification; text-ranking has no"),
        ({"serving": {"dynamo": True}}, "--adapters does not go with serving.dynamo"),
        ({"adapter_labels": None}, "has no head for text-classification: 2 weights would be random"),
    ],
)
def test_build_refuses_a_classifier_by_name(
    headless: Built, options: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    common = {"model": str(headless.checkpoint), "task": TEXT, "output": tmp_path / "out", "adapter_labels": 5}
    with pytest.raises(BuilderError, match=reason):
        build(make_spec(**{**common, **OPTIONS, **options}))
    assert not (tmp_path / "out").exists()


def _classifier(built: Built) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForSequenceClassification.from_pretrained(built.checkpoint)
    return model
