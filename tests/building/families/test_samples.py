"""Samples of a decoder's build: token rows that leave positions for an answer."""

from __future__ import annotations

from pathlib import Path

import pytest

from builder.building.families.decoder import sample_rows
from builder.checkpoints.resolve import resolve
from builder.common.errors import CheckpointError
from builder.options import make_spec
from tests.decoders import make_decoder_checkpoint


def test_samples_leave_positions_for_an_answer(tmp_path: Path) -> None:
    folder = make_decoder_checkpoint(tmp_path / "llama", "llama")
    rows = sample_rows(None, resolve(make_spec(model=str(folder), name="m", max_length=35)))
    assert {len(row) for row in rows} == {3}


@pytest.mark.parametrize("max_length", [16, 32, 34])
def test_few_positions_are_refused_by_their_number(max_length: int, tmp_path: Path) -> None:
    """Regression: 32 positions were refused for samples without tokens; below, samples lost their last tokens."""
    folder = make_decoder_checkpoint(tmp_path / "llama", "llama")
    checkpoint = resolve(make_spec(model=str(folder), name="m", max_length=max_length))
    with pytest.raises(CheckpointError, match=f"takes {max_length} tokens: raise --max-length to 35"):
        sample_rows(None, checkpoint)
