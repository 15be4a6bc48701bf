"""Long texts of decoders: the tokens and logits of `model.generate` after 8,000 tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

from builder.runtime.contract import LayerShape
from scripts.long_parity import CLASSES, COUNT, compare

LONG = 8000  # tokens
CACHES = {  # of both layers
    "sinks": LayerShape(1, 8),
    "latents, absorbed": LayerShape(1, 24),
    "latents, expanded": LayerShape(2, 24),
    "experts, windows": LayerShape(1, 16),
    "chunks": LayerShape(1, 8),
}


@pytest.mark.parametrize("name", CLASSES)
def test_tokens_equal_generate_after_thousands_of_tokens(name: str, tmp_path: Path) -> None:
    answer = compare(CLASSES[name], LONG, tmp_path)
    assert len(set(answer.text)) > COUNT // 2, "not one token repeated"
    assert tuple(answer.engines) == tuple(CLASSES[name].engines)
    assert all(parity.is_equal for parity in answer.engines.values()), answer.engines
    assert set(answer.caches) == {CACHES[name]} if name in CACHES else any(layer.states for layer in answer.caches)
