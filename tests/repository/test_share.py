"""Sharing many models reads each of them a fixed number of times."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from builder.repository.config.render import CONFIG
from builder.repository.report.record import REPORT
from builder.repository.sharing.share import share

MODELS = 12
MAX_READS = 6  # of one file


def _copy(built: Path, entry: Path) -> None:
    """Copy a built model to `entry`, under the name of that folder."""
    shutil.copytree(built, entry)
    for path in [path for name in (CONFIG, REPORT) for path in entry.rglob(name)]:
        path.write_text(path.read_text().replace(f'"{built.name}"', f'"{entry.name}"'))


def test_share_reads_each_model_a_fixed_number_of_times(
    small_repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: each model was looked for in the files of all others, and sharing 500 took minutes."""
    names = [f"model_{number}" for number in range(MODELS)]
    for name in names:
        _copy(small_repository / "topics", tmp_path / "repository" / name)
    reads: Counter[Path] = Counter()
    read_text = Path.read_text

    def counted(path: Path, *args: Any, **options: Any) -> str:
        reads[path] += 1
        return read_text(path, *args, **options)

    monkeypatch.setattr(Path, "read_text", counted)
    assert share(tmp_path / "repository", "encoders", names) == sorted(names)
    path, most = reads.most_common(1)[0]
    assert most <= MAX_READS, f"{path} was read {most} times"
