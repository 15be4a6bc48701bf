"""Rounded variants of models that rank are judged by how they rank, and refused if they rank otherwise."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from builder.building.pipeline import build
from builder.building.variants import encoder
from builder.common.errors import VerificationError
from builder.engines.optimise import quantisation
from builder.options import make_spec
from tests.models import SERVED


@pytest.mark.slow
def test_reranker_in_int8_keeps_its_ranking(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """Regression: its further samples were single texts, so that no rounded variant of a reranker was built."""
    spec = make_spec(model=str(checkpoint("ranks")), task="text-ranking", precision="int8", output=tmp_path / "models")
    report = build(spec)
    served = next(variant for variant in report.variants if variant.name == report.chosen)
    assert served.name.startswith("int8")
    assert report.samples == 32
    assert served.quality is not None
    assert 0.97 <= served.quality < 1, "rounded, and nearly the same order"
    assert served.ranking["recall@10"] >= 0.85


@pytest.mark.slow
@pytest.mark.parametrize("name", ["judges", "late", "hybrid"])
def test_spoilt_int8_is_refused_by_its_ranking(
    name: str, checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights of three values keep the shape of every answer, and lose the order of documents."""
    monkeypatch.setattr(quantisation, "largest_byte_weight", lambda: 1)
    monkeypatch.setattr(encoder, "ROUNDING", 1.0)  # each quality is enough, so that the ranking is judged
    output, options = tmp_path / "models", {"task": SERVED[name].task, "precision": "int8"}
    with pytest.raises(VerificationError, match=r"recall@10 of 0\.\d+ .* is required.*accept less with --quality"):
        build(make_spec(model=str(checkpoint(name)), output=output, **options))
    assert not output.exists()
