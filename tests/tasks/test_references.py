"""The emitted code of each task over PyTorch, against transformers' pipelines, on what checkpoints of others hold."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken

from builder.checkpoint import resolve
from builder.spec import make_spec
from builder.verify.answers import difference
from tests.fronts import answers, front_over_pytorch


@pytest.mark.parametrize(
    ("name", "strategy"), [("names", "none"), ("names", "first"), ("names_bpe", "none"), ("names_bpe", "simple")]
)
def test_words_of_added_tokens_come_without_the_blanks_they_eat(
    name: str, strategy: str, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """An added token with lstrip and rstrip matches the blanks around it; its name in the vocabulary has none."""
    spec = make_spec(model=str(checkpoint(name)))
    found = resolve(spec)
    found.tokenizer.add_tokens([AddedToken("xyzzy", lstrip=True, rstrip=True, normalized=False)])
    found.model.resize_token_embeddings(len(found.tokenizer), mean_resizing=False)
    text = "Mario moved from Turin to  xyzzy  last year."
    sample: dict[str, Any] = {"text_input": text, "ignore_labels": ["none"], "aggregation_strategy": strategy}
    expected = found.task.reference(found, spec, sample)
    (answer,) = answers(front_over_pytorch(found, spec, tmp_path), found, [sample])
    assert "xyzzy" in expected["entities"]
    error, where = difference(expected, answer)
    assert error < 1e-5, where
