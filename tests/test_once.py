"""What workers share: made once and, where that failed, made anew by the next that needs it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.once import once


def test_each_worker_is_told_the_error_itself(tmp_path: Path) -> None:
    """Not that of what the one before it has left."""
    place, made = tmp_path / "shared", []

    def make(fails: bool) -> None:
        (place / "repository").mkdir()
        assert not fails, "no room"
        made.append(place)

    for _ in range(2):
        with pytest.raises(AssertionError, match="no room"):
            once(place, lambda: make(fails=True))
    for _ in range(2):
        once(place, lambda: make(fails=False))
    assert made == [place]
    assert (place / "repository").is_dir()
