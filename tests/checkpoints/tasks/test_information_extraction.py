"""Schemas filled as GLiNER2 fills them for seeded checkpoints, by the build's reference and the emitted code."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from safetensors.torch import load_file

from builder.building.families.encoder import Encoder
from builder.building.families.encoder.results import ExportedEncoder
from builder.checkpoints.checkpoint import Checkpoint
from builder.checkpoints.gliner2.weights import load_head
from builder.checkpoints.resolve import resolve
from builder.checkpoints.tasks.base import one_pipeline
from builder.checkpoints.tasks.information_extraction import TASK
from builder.common.errors import CheckpointError
from builder.common.tensors import to_tensors
from builder.graphs.export.encoder import task_graph
from builder.options import make_spec
from builder.runtime.encoder.filling import fill
from builder.runtime.encoder.joining import join
from builder.runtime.encoder.pipeline import Pipeline
from builder.runtime.encoder.schemas import lay_out, read_schema
from builder.runtime.encoder.tasks.information_extraction import OUTPUTS
from builder.runtime.fields import InputError
from tests.extractors import GLINER2S, make_gliner2
from tests.fronts import answers, front_over_pytorch
from tests.golden import checkpoints

GOLDEN = json.loads((Path(checkpoints.__file__).parent / "information_extraction.json").read_text("utf-8"))
REQUESTS = [
    {**request, **({"schema": json.dumps(request["schema"])} if "schema" in request else {})}
    for request in GOLDEN["requests"]
]
Fronts = Callable[[str], tuple[Checkpoint, Pipeline]]


@pytest.fixture(scope="module")
def fronts(module_folder: Callable[[str], Path]) -> Fronts:
    """Return the checkpoint of a name with its emitted front over PyTorch, made once."""
    made: dict[str, tuple[Checkpoint, Pipeline]] = {}

    def make(name: str) -> tuple[Checkpoint, Pipeline]:
        if name not in made:
            spec = make_spec(model=str(make_gliner2(module_folder(name) / "model", **GLINER2S[name])))
            checkpoint, folder = resolve(spec), module_folder(f"{name}-front")
            made[name] = checkpoint, front_over_pytorch(checkpoint, spec, folder)
        return made[name]

    return make


@pytest.mark.parametrize("name", GLINER2S)
def test_schemas_are_filled_as_by_gliner2(name: str, fronts: Fronts) -> None:
    """The emitted code answers requests of other lengths and schemas in one batch, the reference one at a time."""
    checkpoint, front = fronts(name)
    expected = [case for case in GOLDEN["cases"] if case["checkpoint"] == name]
    assert front.serving.batching.alike is None
    by_threshold: dict[float, list[int]] = {}
    for number, request in enumerate(REQUESTS):
        by_threshold.setdefault(request.get("threshold", 0.5), []).append(number)
    served = dict[int, dict[str, Any]]()
    for numbers in by_threshold.values():
        served.update(zip(numbers, answers(front, checkpoint, [REQUESTS[number] for number in numbers]), strict=True))
    with one_pipeline():
        referred = [TASK.reference(checkpoint, request) for request in REQUESTS]
    for number, case in enumerate(expected):
        for answer in (served[number], referred[number]):
            _compare({part: json.loads(answer[part]) for part in OUTPUTS}, {part: case[part] for part in OUTPUTS})


def _compare(own: Any, expected: Any, *path: Any) -> None:
    """Compare two answers, scores within 2e-5."""
    if isinstance(expected, dict):
        assert own.keys() == expected.keys(), path
        for name, value in expected.items():
            _compare(own[name], value, *path, name)
    elif isinstance(expected, list):
        assert len(own) == len(expected), path
        for number, (one, other) in enumerate(zip(own, expected, strict=True)):
            _compare(one, other, *path, number)
    elif isinstance(expected, float):
        assert own == pytest.approx(expected, abs=2e-5), path
    else:
        assert own == expected, path


def test_batch_mates_do_not_change_answers(fronts: Fronts) -> None:
    """Rows of other lengths and schemas pad the words and each kind of marker of a row."""
    checkpoint, front = fronts("deberta")
    samples = [{**REQUESTS[number], "threshold": 0.5} for number in (1, 4, 10, 15, 12)]
    alone = [answers(front, checkpoint, [sample])[0] for sample in samples]
    for one, other in zip(alone, answers(front, checkpoint, samples), strict=True):
        assert TASK.difference(one, other)[0] < 1e-5
        assert TASK.agreement(one, other) == 1


def test_long_texts_are_cut_between_words_or_refused(fronts: Fronts) -> None:
    checkpoint, front = fronts("bert")
    text = " ".join(GOLDEN["requests"][number]["text_input"] for number in (0, 1, 0, 1, 0, 1, 0, 1) * 4)
    sample = {"text_input": text, "labels": ["person"], "truncate": True}
    (cut,) = answers(front, checkpoint, [sample])
    end = max(one["end"] for one in json.loads(cut["entities"]))
    assert cut["truncated"]
    assert 500 < cut["prompt_tokens"] <= 512
    (whole,) = answers(front, checkpoint, [{**sample, "text_input": text[:end]}])
    assert not whole["truncated"]
    assert "the limit of this model is 512" in _refusal(front, checkpoint, {**sample, "truncate": False})
    (all_of_it,) = answers(front, checkpoint, [{**sample, "truncate": False, "windows": True}])
    found = json.loads(all_of_it["entities"])
    assert not all_of_it["truncated"]
    assert found[-1]["end"] > len(text) - 100 > end
    assert all(one["end"] <= other["start"] for one, other in pairwise(found))
    labels = [f"a rather long label {number}" for number in range(60)]
    assert "send a shorter schema" in _refusal(front, checkpoint, {**sample, "labels": labels})


def test_many_windows_are_refused_before_they_are_tokenised(fronts: Fronts, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: each of them repeats the schema, so that a long text took the memory of millions of tokens."""
    checkpoint, front = fronts("bert")
    monkeypatch.setattr(front.task, "text", Mock(side_effect=AssertionError))
    sample = {"labels": [f"type {number}" for number in range(60)], "text_input": "Yes " * 40_000, "windows": True}
    assert "takes at most 131072 at once" in _refusal(front, checkpoint, sample)


def test_answers_of_windows_are_joined() -> None:
    """Entities that overlap and classes are the best of any window; what two windows find alike is answered once."""
    schema = read_schema(
        json.dumps(
            {
                "structures": {"s": {"fields": [{"name": "f"}]}},
                "entities": {"a": {}, "b": {}, "c": {"dtype": "str"}},
                "relations": ["r"],
                "classifications": [
                    {"task": "one", "labels": ["x", "y"]},
                    {"task": "many", "labels": ["x", "y", "z"], "multi_label": True},
                ],
            }
        ),
        "",
    )

    def entity(label: str, start: int, end: int, score: float) -> dict[str, Any]:
        return {"start": start, "end": end, "text": "", "label": label, "score": score}

    def window(score: float, label: str, *entities: dict[str, Any]) -> dict[str, Any]:
        span = {"start": 3, "end": 5, "text": "", "score": score}
        return {
            "entities": list(entities),
            "classifications": {
                "one": [{"label": label, "score": score}],
                "many": [{"label": label, "score": score}, {"label": "z", "score": 1.25 - score}],
            },
            "relations": [{"label": "r", "head": span, "tail": {**span, "start": 4}}],
            "structures": {"s": [{"f": [span]}, {"f": [{**span, "end": int(score * 10)}]}]},
        }

    first = window(0.6, "x", entity("a", 0, 4, 0.6), entity("b", 0, 4, 0.6), entity("c", 0, 1, 0.7))
    second = window(0.7, "y", entity("a", 3, 6, 0.7), entity("a", 6, 7, 0.5), entity("c", 5, 6, 0.6))
    joined = join(schema, [first, second])
    places = [(one["label"], one["start"], one["score"]) for one in joined["entities"]]
    assert places == [("b", 0, 0.6), ("c", 0, 0.7), ("a", 3, 0.7), ("a", 6, 0.5)]
    assert joined["classifications"]["one"] == [{"label": "y", "score": 0.7}]
    assert [one["label"] for one in joined["classifications"]["many"]] == ["y", "z", "x"]
    assert joined["relations"] == second["relations"]
    assert [one["f"][0]["end"] for one in joined["structures"]["s"]] == [5, 6, 7]
    assert joined["structures"]["s"][0]["f"][0]["score"] == 0.7


def test_size_of_pytorch_counts_the_layers_after_the_encoder(fronts: Fronts, tmp_path: Path) -> None:
    """Regression: the report of a build had the size of the encoder alone."""
    checkpoint, _ = fronts("bert")
    exported = ExportedEncoder(Mock(module=task_graph(checkpoint)), ())
    measured = Encoder(make_spec(model="x", target="cuda"), checkpoint, tmp_path, ()).reference(exported)
    saved = load_file(checkpoint.folder / "model.safetensors")
    assert measured.size == 4 * sum(values.numel() for values in saved.values())


def _refusal(front: Pipeline, checkpoint: Checkpoint, sample: dict[str, Any]) -> str:
    (answer,) = front([to_tensors(sample, TASK.fields({})[0])])
    assert isinstance(answer, InputError), answer
    return str(answer)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"schema": None}, "no labels and no schema; send labels"),
        ({"labels": ["person"]}, "labels and schema; send labels"),
        ({"text_input": " "}, "text_input, row 0, is empty"),
        ({"threshold": 1.5}, "threshold is 1.5; expected a score from 0 to 1"),
        ({"schema": "{"}, "schema, row 0 is not JSON"),
        ({"schema": "[" * 100_000}, "schema, row 0 is not JSON"),
        ({"schema": "3"}, "schema, row 0 is 3; expected an object"),
        ({"schema": "{}"}, "is empty; expected one or more of structures, entities"),
        ({"schema": '{"entities": ["\\ud83d"]}'}, "schema, row 0.entities[0] has half of a surrogate pair"),
        ({"schema": '{"relations": {"\\udc00": {}}}'}, "schema, row 0.relations has half of a surrogate pair"),
        ({"schema": '{"\\udc00": 3}'}, "which is not supported"),
        ({"schema": {"entity_attributes": {}}}, "'entity_attributes', which is not supported; known are"),
        ({"schema": {"entities": []}}, "schema, row 0.entities is []; expected a list that is not empty"),
        ({"schema": {"entities": ["a", "a"]}}, "names 'a' twice"),
        ({"schema": {"entities": {"a": 3}}}, "entities.a is 3; expected an object of description"),
        ({"schema": {"entities": {"a": {"threshold": True}}}}, "threshold is true; expected a score from 0 to 1"),
        ({"schema": {"entities": {"a": {"dtype": "int"}}}}, 'dtype is "int"; expected list (all) or str'),
        ({"schema": {"relations": "x"}}, 'relations is "x"; expected a list of names, or an object'),
        ({"schema": {"structures": ["x"]}}, "expected an object of names and their fields"),
        ({"schema": {"structures": {"x": {"fields": []}}}}, "structures.x.fields is []"),
        ({"schema": {"structures": {"x": {"fields": [{"name": "y"}], "mode": "natural"}}}}, "'mode', which is not"),
        ({"schema": {"structures": {"x": {"fields": [{"name": "y"}, {"name": "y"}]}}}}, "names 'y' twice"),
        (
            {"schema": {"structures": {"x": {"fields": [{"name": "y", "choices": ["Yes", "yes"]}]}}}},
            "names 'yes' twice",
        ),
        ({"schema": {"classifications": [{"task": "t", "labels": ["a"]}]}}, "one label; expected at least two"),
        ({"schema": {"classifications": [{"task": "t", "labels": ["a", "b"], "top_k": 0}]}}, "top_k is 0"),
        ({"schema": {"classifications": [{"task": "t", "labels": ["a", "b"], "class_act": "x"}]}}, "one of auto"),
        ({"schema": {"classifications": [{"task": "t", "labels": ["a", "b"]}] * 2}}, "names 't' twice"),
    ],
)
def test_schemas_that_are_not_understood_are_refused(changes: dict[str, Any], expected: str, fronts: Fronts) -> None:
    checkpoint, front = fronts("bert")
    sample = {"text_input": "Yes", "schema": {"entities": ["person"]}, **changes}
    if not isinstance(sample["schema"], str):
        sample["schema"] = json.dumps(sample["schema"])
    if changes.get("schema", "") is None:
        del sample["schema"]
    assert expected in _refusal(front, checkpoint, sample)


def test_fill_finds_nothing_if_no_instance_is_counted() -> None:
    """The number of instances is decided apart from the scores of spans, for entities too."""
    schema = read_schema(
        '{"entities": ["a"], "relations": ["r"], "structures": {"s": {"fields": [{"name": "f"}]}}}', ""
    )
    counts = np.zeros((3, 20), np.float32)
    logits = {
        "spans": np.full((2, 1, 1), 9, np.float32),
        "instances": np.full((2, 1, 19, 3), 9, np.float32),
        "counts": counts,
        "classes": np.zeros(1, np.float32),
    }
    nothing = {"entities": [], "classifications": {}, "relations": [], "structures": {"s": []}}
    assert fill(schema, lay_out(schema), "x", [(0, 1), (1, 2)], logits, 0.5) == nothing
    counts[:, 1] = 1
    found = fill(schema, lay_out(schema), "x", [(0, 1), (1, 2)], logits, 0.5)
    assert [len(found[part]) for part in ("entities", "relations")] == [1, 1]
    assert [one["end"] for one in found["structures"]["s"][0]["f"]] == [1], "the full stop is not of the text"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"architecture": "boundary"},
            r"\(of GLiNER2\) has architecture 'boundary' .* not implemented; expected 'span'",
        ),
        ({"span_head": {"span_mode": "conv"}}, "has span_mode 'conv' .* not implemented"),
        ({"token_pooling": "mean"}, "has token_pooling 'mean' .* expected 'first'"),
        ({"counting_layer": "count_gru"}, "has counting_layer 'count_gru' .* 'count_lstm_moe'"),
        ({"span_head": {"max_width": 0}}, "has max_width '0' in config.json; expected a number from 1 on"),
        ({"max_width": 1001}, "says max_width 1001, more than any checkpoint has"),
        ({"span_head": 3}, "has span_head '3'"),
    ],
)
def test_settings_that_are_not_implemented_are_refused(changes: dict[str, Any], expected: str, tmp_path: Path) -> None:
    folder = make_gliner2(tmp_path / "model", "bert")
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, **changes}))
    with pytest.raises(CheckpointError, match=expected):
        resolve(make_spec(model=str(folder)))


def test_incomplete_checkpoints_are_refused(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="information-extraction is for checkpoints of GLiNER2"):
        resolve(make_spec(model=str(checkpoint("names")), task="information-extraction"))
    folder = make_gliner2(tmp_path / "model", "bert", counting_layer="count_lstm")
    with pytest.raises(CheckpointError, match="is a checkpoint of GLiNER2 and cannot be served for entity-extraction"):
        resolve(make_spec(model=str(folder), task="entity-extraction"))
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, "counting_layer": "count_lstm_v2"}))
    resolved = resolve(make_spec(model=str(folder)))
    with pytest.raises(CheckpointError, match=r"are not those that its config.json describes.*count_embed"):
        load_head(resolved)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (folder / file).write_text((folder / file).read_text("utf-8").replace("[SEP_TEXT]", "[OTHER]"), "utf-8")
    with pytest.raises(CheckpointError, match=r"has no token \[SEP_TEXT\]"):
        resolve(make_spec(model=str(folder)))
    (folder / "encoder_config" / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no encoder_config/config.json; save it once more with gliner2"):
        resolve(make_spec(model=str(folder)))


@pytest.mark.parametrize("name", GLINER2S)
def test_tiny_checkpoints_are_as_gliner2_saves_them(name: str, tmp_path: Path) -> None:
    folder = make_gliner2(tmp_path / "model", **GLINER2S[name])
    shapes = {name: list(weights.shape) for name, weights in sorted(load_file(folder / "model.safetensors").items())}
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    assert {"files": files, "weights": shapes} == GOLDEN["saved"][name]
