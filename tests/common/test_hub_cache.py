"""Read the snapshot that a folder of the Hub's cache stands for, or refuse by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from builder.building.keys import checkpoint_facts
from builder.checkpoints.fetch import fetch
from builder.common.data_folders import read_parts
from builder.common.errors import SpecError
from builder.common.hub_cache import current_snapshot
from builder.options import Source

OLD, NEW = "0" * 40, "1" * 40


def cached(folder: Path, *commits: str, main: str | None = None) -> Path:
    """Write a repository's folder in the Hub's cache with a snapshot for each commit."""
    for commit in commits:
        (folder / "snapshots" / commit).mkdir(parents=True)
        (folder / "snapshots" / commit / "rows.jsonl").write_text(f'{{"commit": "{commit}"}}')
    if main is not None:
        (folder / "refs").mkdir()
        (folder / "refs" / "main").write_text(main)
    return folder


def test_folder_of_the_hub_cache_stands_for_one_snapshot(tmp_path: Path) -> None:
    """Regression: without refs/main, which a download of one commit does not write, the folder was read as it is."""
    models, data = cached(tmp_path / "models--org--a", NEW), cached(tmp_path / "datasets--org--a", NEW)
    assert fetch(str(models), None, weights=True) == (models / "snapshots" / NEW, None)
    of_folder, of_snapshot = (checkpoint_facts(Source(str(one))) for one in (models, models / "snapshots" / NEW))
    assert of_folder["contents"] == of_snapshot["contents"]
    assert of_folder["source"] == "models--org--a", "Regression: a newer snapshot was refused as another model"
    assert read_parts(data) == {"rows": [{"commit": NEW}]}
    several = cached(tmp_path / "models--org--b", OLD, NEW, main=OLD)
    assert current_snapshot(several) == several / "snapshots" / OLD
    assert current_snapshot(tmp_path) == tmp_path


@pytest.mark.parametrize(
    ("commits", "main", "message"),
    [
        ((OLD, NEW), None, f"no refs/main to choose one; .*/snapshots: {OLD}, {NEW}"),
        ((OLD,), NEW, f"not {NEW}, which refs/main names; .*/snapshots: {OLD}"),
    ],
)
def test_folder_of_the_hub_cache_without_its_snapshot_is_refused(
    commits: tuple[str, ...], main: str | None, message: str, tmp_path: Path
) -> None:
    folder = cached(tmp_path / "models--org--a", *commits, main=main)
    with pytest.raises(SpecError, match=message):
        current_snapshot(folder)
