"""Entities as GLiNER answers for seeded checkpoints, by the build's reference and the emitted code over PyTorch."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from builder.checkpoints.checkpoint import Checkpoint
from builder.checkpoints.gliner.settings import FILE
from builder.checkpoints.gliner.weights import load_head
from builder.checkpoints.resolve import resolve
from builder.checkpoints.tasks.base import encoder_task, one_pipeline
from builder.checkpoints.tasks.entity_extraction import TASK
from builder.common.errors import CheckpointError
from builder.options import make_spec
from builder.runtime.encoder.pipeline import Pipeline
from builder.runtime.fields import InputError
from tests.extractors import GLINERS, make_gliner
from tests.fronts import answers, front_over_pytorch
from tests.golden import checkpoints

GOLDEN = json.loads((Path(checkpoints.__file__).parent / "entity_extraction.json").read_text("utf-8"))
TEXT = GOLDEN["requests"][1]["text_input"]
LABELS = GOLDEN["requests"][1]["labels"]


@pytest.fixture(scope="module")
def fronts(module_folder: Callable[[str], Path]) -> Callable[[str], tuple[Checkpoint, Pipeline]]:
    """Return the checkpoint of a name with its emitted front over PyTorch, made once."""
    made: dict[str, tuple[Checkpoint, Pipeline]] = {}

    def make(name: str) -> tuple[Checkpoint, Pipeline]:
        if name not in made:
            spec = make_spec(model=str(make_gliner(module_folder(name) / "model", **GLINERS[name])))
            checkpoint, folder = resolve(spec), module_folder(f"{name}-front")
            made[name] = checkpoint, front_over_pytorch(checkpoint, spec, folder)
        return made[name]

    return make


Fronts = Callable[[str], tuple[Checkpoint, Pipeline]]


@pytest.mark.parametrize("name", GLINERS)
def test_entities_are_those_of_gliner(name: str, fronts: Fronts) -> None:
    """The emitted code answers all requests in one batch, the reference one at a time."""
    checkpoint, front = fronts(name)
    expected = [case["entities"] for case in GOLDEN["cases"] if case["checkpoint"] == name]
    assert front.serving.batching.alike is None
    for request, entities in zip(GOLDEN["requests"], expected, strict=True):
        (answer,) = answers(front, checkpoint, [request])
        served = json.loads(answer["entities"])
        assert [[one["start"], one["end"], one["label"]] for one in served] == [one[:3] for one in entities]
        assert np.allclose([one["score"] for one in served], [one[3] for one in entities], atol=2e-5)
        assert all(one["text"] == request["text_input"][one["start"] : one["end"]] for one in served)
    with one_pipeline():
        referred = [json.loads(TASK.reference(checkpoint, request)["entities"]) for request in GOLDEN["requests"]]
    places = [[[one["start"], one["end"], one["label"]] for one in entities] for entities in referred]
    assert places == [[one[:3] for one in entities] for entities in expected]
    assert sum(map(len, expected)) > 20


@pytest.mark.parametrize("name", ["deberta", "tokens"])
def test_batch_mates_do_not_change_entities(name: str, fronts: Fronts) -> None:
    """Rows of other lengths, with more labels, pad the words and the labels of a row."""
    checkpoint, front = fronts(name)
    samples = [{"text_input": text, "labels": TASK.samples[5]["labels"][:count]} for text, count in (
        (TEXT, 2), ("Yes", 7), (TEXT * 3, 1), ("Oslo is closed.", 3))]  # fmt: skip
    alone = [answers(front, checkpoint, [sample])[0] for sample in samples]
    for one, other in zip(alone, answers(front, checkpoint, samples), strict=True):
        assert TASK.difference(one, other)[0] < 1e-5


def test_windows_find_the_entities_of_long_texts(fronts: Fronts) -> None:
    """Without them, a text of more words than the model reads is refused, or cut if the request allows it."""
    checkpoint, front = fronts("deberta")
    front.task.parameters = {**front.task.parameters, "max_words": 40}
    try:
        sample = {"text_input": " ".join([TEXT] * 8), "labels": LABELS, "threshold": 0.8}
        whole, cut = answers(front, checkpoint, [{**sample, "windows": True}, {**sample, "truncate": True}])
        (refused,) = front([_tensors(sample)])
    finally:
        front.task.parameters = {**front.task.parameters, "max_words": 200}
    found, first = json.loads(whole["entities"]), json.loads(cut["entities"])
    assert isinstance(refused, InputError)
    assert "windows=true" in str(refused)
    assert max(one["end"] for one in first) < 250 < len(sample["text_input"]) - 100 < max(one["end"] for one in found)
    assert (whole["truncated"], cut["truncated"]) == (False, True)
    starts = [one["start"] for one in found]
    assert starts == sorted(set(starts))
    assert all(one["end"] <= other["start"] for one, other in pairwise(found))


def test_many_windows_are_refused_before_they_are_tokenised(fronts: Fronts, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: each of them repeats the labels, so that a long text took the memory of millions of tokens."""
    _, front = fronts("deberta")
    monkeypatch.setattr(front.task, "text", Mock(side_effect=AssertionError))
    sample = {"text_input": "Yes " * 40_000, "labels": [f"type {number}" for number in range(60)]}
    (refused,) = front([{**_tensors(sample), "windows": np.array([[True]])}])
    assert isinstance(refused, InputError)
    assert "takes at most 131072 at once" in str(refused)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"threshold": 1.5}, "from 0 to 1"),
        ({"labels": [""]}, "labels, row 0, is empty"),
        ({"text_input": " "}, "text_input, row 0, is empty"),
        ({"text_input": "a " * 250}, "250 words"),
        ({"labels": [f"a rather long label {number}" for number in range(60)]}, "send fewer labels"),
    ],
)
def test_requests_that_do_not_fit_are_refused(changes: dict[str, Any], expected: str, fronts: Fronts) -> None:
    _, front = fronts("deberta")
    (answer,) = front([_tensors({"text_input": TEXT, "labels": LABELS, **changes})])
    assert isinstance(answer, InputError)
    assert expected in str(answer)


def _tensors(sample: dict[str, Any]) -> dict[str, np.ndarray]:
    tensors = {
        "text_input": np.array([[sample["text_input"].encode()]], object),
        "labels": np.array([[label.encode() for label in sample["labels"]]], object),
    }
    return {
        **tensors,
        **({"threshold": np.array([[sample["threshold"]]], np.float32)} if "threshold" in sample else {}),
    }


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("span_mode", "conv_max"),
        ("model_type", "gliner_streaming_span"),
        ("words_splitter_type", "jieba"),
        ("subtoken_pooling", "mean"),
        ("labels_encoder", "bge"),
        ("relations_layer", "gcn"),
        ("fuse_layers", True),
    ],
)
def test_settings_that_are_not_implemented_are_refused(setting: str, value: Any, tmp_path: Path) -> None:
    folder = make_gliner(tmp_path / "model", "bert")
    settings = json.loads((folder / FILE).read_text())
    (folder / FILE).write_text(json.dumps({**settings, setting: value}))
    with pytest.raises(CheckpointError, match=f"has {setting} .*{value}.* not implemented"):
        resolve(make_spec(model=str(folder)))


def test_incomplete_checkpoints_are_refused(tmp_path: Path) -> None:
    """Older checkpoints have a pickle and name their encoder, whose tokenizer they use."""
    folder = make_gliner(tmp_path / "model", "bert")
    weights = load_file(folder / "model.safetensors")
    del weights["prompt_rep_layer.3.bias"]
    save_file(weights, folder / "model.safetensors")
    resolved = resolve(make_spec(model=str(folder)))
    with pytest.raises(CheckpointError, match=r"prompt_rep_layer.3.bias"):
        TASK.graph(resolved, ())
    with pytest.raises(CheckpointError, match="cannot be served for fill-mask"):
        resolve(make_spec(model=str(folder), task="fill-mask"))
    settings = json.loads((folder / FILE).read_text())
    (folder / FILE).write_text(json.dumps({**settings, "class_token_index": 3}))
    with pytest.raises(CheckpointError, match=r"class_token_index 3 .* do not belong together"):
        resolve(make_spec(model=str(folder)))
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    del settings["encoder_config"]
    (folder / FILE).write_text(json.dumps(settings))
    with pytest.raises(CheckpointError, match=r"no weights .* and no encoder_config .*\n.*save_pretrained"):
        resolve(make_spec(model=str(folder)))
    (folder / FILE).unlink()


def test_other_checkpoints_are_refused(checkpoint: Callable[[str], Path]) -> None:
    with pytest.raises(CheckpointError, match="entity-extraction is for checkpoints of GLiNER"):
        resolve(make_spec(model=str(checkpoint("names")), task="entity-extraction"))


@pytest.mark.parametrize(
    ("setting", "value"),
    [("num_rnn_layers", 9_999_999), ("max_width", 1001), ("max_len", 10**6 + 1), ("hidden_size", 10**7 + 1)],
)
def test_huge_sizes_are_refused(setting: str, value: int, tmp_path: Path) -> None:
    """Regression: PyTorch creates as many layers as the file says before it looks at their weights."""
    folder = make_gliner(tmp_path / "model", "bert")
    settings = json.loads((folder / FILE).read_text())
    (folder / FILE).write_text(json.dumps({**settings, setting: value}))
    with pytest.raises(CheckpointError, match=f"{FILE} .* says {setting} {value}, more than any checkpoint has"):
        resolve(make_spec(model=str(folder)))


@pytest.mark.parametrize(("setting", "value"), [("hidden_size", 10**6), ("num_rnn_layers", 100)])
def test_sizes_without_weights_allocate_nothing(setting: str, value: int, tmp_path: Path) -> None:
    """Regression: a hidden_size of a million failed in PyTorch's allocator, with a traceback."""
    folder = make_gliner(tmp_path / "model", "bert")
    settings = json.loads((folder / FILE).read_text())
    (folder / FILE).write_text(json.dumps({**settings, setting: value}))
    resolved = resolve(make_spec(model=str(folder)))
    with pytest.raises(CheckpointError, match=f"are not those that its {FILE} describes"):
        load_head(resolved)


def _answer(*entities: tuple[int, int, float]) -> dict[str, str]:
    return {"entities": json.dumps([{"start": a, "end": b, "label": "x", "score": c} for a, b, c in entities])}


def test_agreement_compares_entities_below_the_default_threshold() -> None:
    """Regression: of a checkpoint without scores above 0.5 every variant agreed, whatever it answered."""
    agreement = encoder_task(TASK).agreement
    timid = _answer((0, 4, 0.3), (5, 9, 0.2), (10, 12, 0.01))
    assert agreement(timid, timid) == agreement(_answer(), _answer()) == 1
    assert agreement(timid, _answer((0, 4, 0.299), (5, 9, 0.201))) == pytest.approx(0.999)
    for ruined in (
        _answer((0, 4, 0.3), (13, 15, 0.2)),
        _answer((2, 7, 0.3)),
        _answer((0, 4, 1e-6), (5, 9, 1e-6)),
        _answer((0, 4, 0.45), (5, 9, 0.4)),
        _answer(),
    ):
        assert agreement(timid, ruined) < 0.9 < TASK.threshold
        assert agreement(ruined, timid) < 0.9
    assert agreement(timid, _answer((0, 4, 0.6))) == agreement(_answer((0, 4, 0.6)), timid) == 0


def test_scores_that_are_not_numbers_never_agree() -> None:
    broken, whole = _answer((0, 4, math.nan)), _answer((0, 4, 0.9), (5, 6, 0.7))
    for expected, actual in ((broken, broken), (whole, broken), (broken, whole)):
        assert encoder_task(TASK).agreement(expected, actual) == 0
        assert TASK.difference(expected, actual)[0] == math.inf


def test_difference_explains_entities_that_rounding_moves() -> None:
    answer = _answer
    assert TASK.difference(answer((0, 4, 0.9)), answer((0, 4, 0.8)))[0] == pytest.approx(0.1)
    assert TASK.difference(answer((0, 4, 0.9)), answer())[0] == pytest.approx(0.4)
    assert TASK.difference(answer((0, 4, 0.9)), answer((3, 8, 0.8999)))[0] == pytest.approx(1e-4)
    overtaken = TASK.difference(answer((0, 4, 0.9)), answer((3, 8, 0.8999), (0, 2, 0.2)))
    assert overtaken[0] == pytest.approx(1e-4)
    lost = TASK.difference(answer((0, 4, 0.5001), (5, 9, 0.2)), answer((5, 9, 0.2)))
    assert lost[0] == pytest.approx(0.5001), "a threshold of 0.5 does not explain it: 0.2 is answered"
    assert encoder_task(TASK).agreement(answer((0, 4, 0.9), (5, 6, 0.1)), answer((0, 4, 0.9))) == 1
