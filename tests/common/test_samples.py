from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from builder.building.pipeline import build
from builder.building.variants.evaluator import MIN_SAMPLES
from builder.checkpoints.tasks import all_tasks
from builder.checkpoints.tasks.base import EncoderTask
from builder.common.errors import SpecError
from builder.common.samples import TEXTS, load_samples
from builder.options import make_spec
from builder.runtime.fields import Field

FIELDS = (Field("text_input", "TYPE_STRING"), Field("top_k", "TYPE_INT32", optional=True))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"text_input": "a"}\nnot json\n', "line 2, is not JSON"),
        ('{"text": "a"}\n', "line 1: expected an object with text_input"),
        ('{"text_input": "a", "topk": 1}\n', "line 1: expected an object with text_input .and perhaps top_k."),
        ("\n\n", "holds no sample"),
    ],
)
def test_load_samples_names_the_line_of_an_invalid_sample(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    path.write_text(text)
    with pytest.raises(SpecError, match=message):
        load_samples(path, FIELDS)


def test_load_samples_splits_lines_only_at_line_feeds(tmp_path: Path) -> None:
    """JSON allows the other line ends of Unicode inside a text."""
    texts = ["one\u2028two", "three\x85four", "five"]
    path = tmp_path / "samples.jsonl"
    lines = [json.dumps({"text_input": text}, ensure_ascii=False) for text in texts]
    path.write_bytes("\r\n".join(lines).encode())
    assert [sample["text_input"] for sample in load_samples(path, FIELDS)] == texts


def test_build_verifies_the_samples_of_the_user(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    path.write_text('{"text_input": "One fox.", "top_k": 2}\n\n{"text_input": "Two boxes."}\n')
    spec = make_spec(model=str(checkpoint("topics")), name="t", output=tmp_path / "r", samples=path)
    assert build(spec).samples == 2
    path.write_text('{"text_input": "' + "word " * 900 + '"}\n')
    with pytest.raises(SpecError, match="sample 1 is refused by the model itself: row 0 has"):
        build(spec)
    path.write_text('{"text_input": "One fox."}\n{"text_input": "Two boxes.", "top_k": 2.5}\n')
    with pytest.raises(SpecError, match=r"sample 2: top_k is 2\.5; expected INT32"):
        build(spec)


def test_default_texts_have_mixed_lengths() -> None:
    words = sorted(len(text.split()) for text in TEXTS)
    assert words[0] < 10
    assert words[-1] > 120
    assert len(set(TEXTS)) == len(TEXTS) == 32


def test_samples_of_a_task_have_the_same_keys() -> None:
    """Regression: rerankers and zero-shot classifiers had single texts as further samples, so no int8 was built."""
    for task in all_tasks().values():
        if isinstance(task, EncoderTask) and task.more_samples:
            kinds = {tuple(sorted(sample)) for sample in task.samples}
            assert {tuple(sorted(sample)) for sample in task.more_samples} <= kinds, task.name


def test_encoder_tasks_have_enough_calibration_samples() -> None:
    tasks = [task for task in all_tasks().values() if isinstance(task, EncoderTask)]
    assert len(tasks) >= 8
    assert {task.name: len(task.samples) for task in tasks if len(task.samples) < MIN_SAMPLES} == {}
