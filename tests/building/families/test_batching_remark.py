"""The build's remark about texts that may share an engine call."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from builder.building.families.encoder.results import _batching_remark
from builder.runtime.contract import Alike, Batching


@pytest.mark.parametrize(
    ("constraint", "texts"),
    [("length", "texts of the same number of tokens"), (2, "texts in which the token 2 is equally frequent")],
)
def test_batching_remark_names_the_texts_that_share_a_call(constraint: Alike, texts: str) -> None:
    """Regression: the remark said "with as many tokens 2"."""
    remark = _batching_remark(_evaluator(constraint))
    assert remark is not None
    assert f"only {texts} share an engine call" in remark


def test_batching_remark_is_absent_without_a_constraint() -> None:
    assert _batching_remark(_evaluator(None)) is None


def _evaluator(constraint: Alike) -> Any:
    batching = Batching(token_budget=1, max_rows=1, call_cost=0, alike=constraint)
    return SimpleNamespace(serving=SimpleNamespace(batching=batching))
