"""The emitted code of each task over PyTorch, against transformers' pipelines, with unusual checkpoint settings."""

from __future__ import annotations

import json
import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import AddedToken

from builder import build
from builder.checkpoints.distances import difference
from builder.checkpoints.resolve import resolve
from builder.checkpoints.tasks.base import encoder_task, one_pipeline, pipeline_of
from builder.checkpoints.transitions import read_transition_biases
from builder.common.errors import CheckpointError, SpecError
from builder.common.samples import TEXTS
from builder.options import make_spec
from builder.runtime.encoder.tags import BIASES
from tests.fronts import answers, front_over_pytorch
from tests.models import SERVED
from tests.tiny_encoders import make_checkpoint


@pytest.mark.parametrize(
    ("name", "strategy"), [("names", "none"), ("names", "first"), ("names_bpe", "none"), ("names_bpe", "simple")]
)
def test_added_tokens_are_words_without_their_spaces(
    name: str, strategy: str, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """An added token with lstrip and rstrip matches surrounding spaces, which its name does not contain."""
    spec = make_spec(model=str(checkpoint(name)))
    resolved = resolve(spec)
    resolved.tokenizer.add_tokens([AddedToken("xyzzy", lstrip=True, rstrip=True, normalized=False)])
    resolved.model.resize_token_embeddings(resolved.config.vocab_size + 1, mean_resizing=False)
    text = "Mario moved from Turin to  xyzzy  last year."
    sample: dict[str, Any] = {"text_input": text, "ignore_labels": ["none"], "aggregation_strategy": strategy}
    expected = encoder_task(resolved.task).reference(resolved, sample)
    (answer,) = answers(front_over_pytorch(resolved, spec, tmp_path), resolved, [sample])
    assert "xyzzy" in expected["entities"]
    error, where = difference(expected, answer)
    assert error < 1e-5, where


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["topics", "entail"])
def test_texts_are_truncated_on_the_tokenizers_side(
    name: str, side: str, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """With truncation, texts are cut like in the pipelines: a single text, and the first text of a pair."""
    spec = make_spec(model=str(checkpoint(name)), task=SERVED[name].task, max_length=24, truncate=True)
    resolved = resolve(spec)
    resolved.tokenizer.truncation_side, resolved.tokenizer.model_max_length = side, 24
    sample: dict[str, Any] = {"text_input": TEXTS[26]}
    if name == "entail":
        sample["candidate_labels"] = ["food", "travel"]
        expected = encoder_task(resolved.task).reference(resolved, sample)
    else:
        cut = resolved.tokenizer(TEXTS[26], truncation=True, return_tensors="pt")
        with torch.no_grad():
            scores = resolved.model(**cut).logits[0].softmax(-1)
        expected = {"score": [float(scores.max())]}
    (answer,) = answers(front_over_pytorch(resolved, spec, tmp_path), resolved, [sample])
    error, where = difference(expected, answer)
    assert error < 1e-5, where
    assert answer["truncated"] is True


@pytest.mark.parametrize("clean_up", [False, True])
def test_fill_mask_writes_texts_like_the_pipeline(
    clean_up: bool, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """Check the whole vocabulary, with the hidden padding token, with and without clean-up of spaces."""
    spec = make_spec(model=str(checkpoint("masks")))
    resolved = resolve(spec)
    resolved.tokenizer.clean_up_tokenization_spaces = clean_up
    sample = {"text_input": "The [MASK] , is n't to the door .", "top_k": resolved.config.vocab_size}
    expected = encoder_task(resolved.task).reference(resolved, sample)
    (answer,) = answers(front_over_pytorch(resolved, spec, tmp_path), resolved, [sample])

    def shown(document: str) -> dict[int, str]:
        return {entry["token"]: entry["sequence"] for entry in json.loads(document)}

    assert shown(answer["predictions"]) == shown(expected["predictions"])


def test_inputs_that_the_model_does_not_take_are_dropped(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """Many DistilBERT checkpoints have a BERT tokeniser, on which transformers' pipeline fails."""
    folder = Path(shutil.copytree(checkpoint("names"), tmp_path / "names"))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["model_input_names"] = ["input_ids", "token_type_ids", "attention_mask"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    spec = make_spec(model=str(folder))
    resolved = resolve(spec)
    sample = {"text_input": TEXTS[11]}
    (answer,) = answers(front_over_pytorch(resolved, spec, tmp_path), resolved, [sample])
    error, where = difference(encoder_task(resolved.task).reference(resolved, sample), answer)
    assert error < 1e-5, where


def test_context_before_its_question_is_refused(checkpoint: Callable[[str], Path]) -> None:
    spec = make_spec(model=str(checkpoint("answers")))
    resolved = resolve(spec)
    resolved.tokenizer.padding_side = "left"
    with pytest.raises(CheckpointError, match="pads on the left"):
        encoder_task(resolved.task).parameters(resolved)


def test_special_tokens_in_a_context_are_plain_words(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """Regression: the reference counted a [CLS] in the context twice, and builds refused samples with one."""
    spec = make_spec(model=str(checkpoint("answers")), max_length=128)
    resolved = resolve(spec)
    sample = {"question": "Who?", "context": "[MASK] and [SEP] in a text [CLS]"}
    expected = encoder_task(resolved.task).reference(resolved, sample)
    (answer,) = answers(front_over_pytorch(resolved, spec, tmp_path), resolved, [sample])
    error, where = difference(expected, answer)
    assert error < 1e-5, where


OPTIONS: dict[str, dict[str, Any]] = {  # options of a request before one without options
    "names": {"aggregation_strategy": "simple"},
    "topics": {"top_k": 3},
    "masks": {"top_k": 2},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_cached_pipeline_answers_like_a_new_one(name: str, checkpoint: Callable[[str], Path]) -> None:
    """Options of one request must not apply to the next."""
    resolved = resolve(make_spec(model=str(checkpoint(name))))
    task = encoder_task(resolved.task)
    text = {"text_input": f"The museum in {resolved.tokenizer.mask_token or 'Oslo'} is closed."}
    samples = [text | OPTIONS[name], text]
    anew = [task.reference(resolved, sample) for sample in samples]
    with one_pipeline():
        assert [task.reference(resolved, sample) for sample in samples] == anew
        assert pipeline_of(resolved, task.name) is pipeline_of(resolved, task.name)
    assert pipeline_of(resolved, task.name) is not pipeline_of(resolved, task.name)


UNICODE = "Zürich – 東京 and the naïve 🚆 café."
VITERBI_REQUEST = {"text_input": "a", "aggregation_strategy": "viterbi"}
TAGS = ["O", *(f"{place}-{name}" for name in ("PER", "LOC") for place in "BIES")]


@pytest.mark.parametrize("strategy", ["none", "simple", "first", "average", "max", "viterbi"])
@pytest.mark.parametrize("model_type", ["distilbert", "roberta"])
def test_entities_of_tags_with_ends(model_type: str, strategy: str, tmp_path: Path) -> None:
    """Only the tags of BIOES that may follow each other are one entity, by any strategy."""
    folder = make_checkpoint(tmp_path / "tags", model_type, "token-classification", dict(enumerate(TAGS)))
    _calibrate(folder, {"background_stay": -2.0, "inside_to_continue": 1.0})
    spec = make_spec(model=str(folder))
    resolved = resolve(spec)
    samples = [{"text_input": text, "aggregation_strategy": strategy} for text in (TEXTS[11], UNICODE, "a")]
    found = answers(front_over_pytorch(resolved, spec, tmp_path), resolved, samples)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Tokenizer does not support real words")
        expected = [encoder_task(resolved.task).reference(resolved, sample) for sample in samples]
    for one, other in zip(expected, found, strict=True):
        error, where = difference(one, other)
        assert error < 1e-5, where


def test_tags_of_tokens_become_whole_entities(tmp_path: Path) -> None:
    """Compare with a regular expression over the tags of each token, without the code that both halves share."""
    folder = make_checkpoint(tmp_path / "tags", "roberta", "token-classification", dict(enumerate(TAGS)))
    spec = make_spec(model=str(folder))
    resolved = resolve(spec)
    front = front_over_pytorch(resolved, spec, tmp_path)
    entity = re.compile(r"B(\w) (?:I\1 )*(?:E\1 )?|S\w |I(\w) (?:I\2 )*(?:E\2 )?|E\w ")
    texts = [{"text_input": text, "ignore_labels": ["O"]} for text in TEXTS]
    longest = 0
    for text in texts:
        tokens, entities = (
            json.loads(answers(front, resolved, [{**text, "aggregation_strategy": strategy}])[0]["entities"])
            for strategy in ("none", "simple")
        )
        runs: list[list[dict[str, Any]]] = []  # of tokens without one outside of entities between them
        for token in tokens:
            if runs and token["index"] == runs[-1][-1]["index"] + 1:
                runs[-1].append(token)
            else:
                runs.append([token])
        expected = []
        for run in runs:
            for match in entity.finditer("".join(f"{token['entity'][0]}{token['entity'][2]} " for token in run)):
                first, last = run[match.start() // 3], run[match.end() // 3 - 1]
                expected.append((first["start"], last["end"], first["entity"][2:]))
                longest = max(longest, len(match[0]) // 3)
        assert [(one["start"], one["end"], one["entity_group"]) for one in entities] == expected
    assert longest > 1


def test_likeliest_tags_are_refused_without_ends_of_entities(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    spec = make_spec(model=str(checkpoint("names")))
    front = front_over_pytorch(resolve(spec), spec, tmp_path)
    tensors = {name: np.array([[text]], object) for name, text in VITERBI_REQUEST.items()}
    (error,) = front([tensors])
    assert str(error).endswith("expected one of none, simple, first, average, max")


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        ({"operating_points": {"default": {"biases": {"transition_bias_end_to_start": 1.0}}}}, "exactly"),
        ({"operating_points": {"strict": {}}}, "strict where exactly default"),
        ({"operating_points": []}, "where exactly default"),
        ({}, "exactly operating_points"),
    ],
)
def test_unknown_calibrations_are_refused(document: dict[str, Any], expected: str, tmp_path: Path) -> None:
    (tmp_path / "viterbi_calibration.json").write_text(json.dumps(document))
    with pytest.raises(CheckpointError, match=expected):
        read_transition_biases(tmp_path)


@pytest.mark.parametrize("value", [float("nan"), True, "1"])
def test_biases_that_are_not_numbers_are_refused(value: Any, tmp_path: Path) -> None:
    _calibrate(tmp_path, {"end_to_start": value})
    with pytest.raises(CheckpointError, match=r"transition_bias_end_to_start .* finite number"):
        read_transition_biases(tmp_path)


def _calibrate(folder: Path, biases: dict[str, Any]) -> None:
    """Write the biases of a checkpoint, as openai/privacy-filter has them."""
    values = {f"transition_bias_{name}": biases.get(name, 0.0) for name in BIASES}
    document = {"operating_points": {"default": {"biases": values}}}
    (folder / "viterbi_calibration.json").write_text(json.dumps(document))


@pytest.mark.parametrize(
    ("name", "task"),
    [("entail", "zero-shot-classification"), ("ranks", "text-ranking"), ("writes", "text-generation")],
)
def test_scores_of_classes_are_refused_for_other_tasks(
    name: str, task: str, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    model = str(checkpoint(name))
    with pytest.raises(SpecError, match=r"serving\.dynamo"):
        build(make_spec(model=model, task=task, name=name, output=tmp_path, serving={"dynamo": True}))
