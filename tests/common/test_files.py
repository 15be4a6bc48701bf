"""Locks by files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from builder.common.files import lock_file


@pytest.mark.parametrize("look", [1, 2])
def test_lock_is_taken_if_its_file_is_removed_meanwhile(
    look: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: a former holder removed the file between two looks at it, which raised and kept its lock."""
    path, looks, stat = tmp_path / "lock", 0, Path.stat

    def remove_and_stat(looked_at: Path, *, follow_symlinks: bool = True) -> os.stat_result:
        nonlocal looks
        if looked_at == path:
            looks += 1
            if looks == look:
                path.unlink()
        return stat(looked_at, follow_symlinks=follow_symlinks)

    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(Path, "stat", remove_and_stat)
    with lock_file(path):
        monkeypatch.undo()
        assert path.exists()
    assert not path.exists()
    assert len(os.listdir("/proc/self/fd")) == before
