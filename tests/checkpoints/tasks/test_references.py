"""The emitted code of each task over PyTorch, against transformers' pipelines, with unusual checkpoint settings."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken

from builder.checkpoints.distances import difference
from builder.checkpoints.resolve import resolve
from builder.checkpoints.tasks.base import encoder_task, one_pipeline, pipeline_of
from builder.common.errors import CheckpointError
from builder.common.samples import TEXTS
from builder.options import make_spec
from tests.fronts import answers, front_over_pytorch
from tests.models import SERVED


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
