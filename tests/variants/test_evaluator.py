"""The engine's inputs that a build fits to are those of every sample, or the build stops."""

from __future__ import annotations

from pathlib import Path

import pytest

from builder.errors import SpecError
from builder.runtime.contract import FILE, dump
from builder.runtime.encoder.task import Task
from builder.runtime.fields import Field, InputError
from builder.variants import evaluator
from tests.checkpoints import make_tokenizer
from tests.servings import encoder_serving


@pytest.mark.parametrize(
    ("error", "raised", "message"),
    [
        (InputError("too long"), SpecError, "sample 1 is refused by the model itself: too long"),
        (KeyError("ids"), KeyError, "ids"),
    ],
)
def test_a_sample_that_fails_is_not_left_out(
    error: Exception, raised: type[Exception], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(Task, "rows", fail)
    (tmp_path / FILE).write_text(dump(encoder_serving()))
    (tmp_path / "tokenizer.json").write_text(make_tokenizer("wordpiece", type_ids=True).backend_tokenizer.to_str())
    with pytest.raises(raised, match=message):
        evaluator._engine_feeds(tmp_path, ((Field("text_input", "TYPE_STRING"),), ()), ({"text_input": "a museum"},))
