"""The cache of stages stays within its limit."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from builder.building.pipeline import build
from builder.cli import main
from builder.common.cache.entries import CacheEntries, bounded_cache
from builder.common.cache.folder import FOLDER_VARIABLE, LIMIT_VARIABLE, max_cache_bytes
from builder.common.errors import SpecError, VerificationError
from builder.options import make_spec

SIZE = 10_000


class Disk(NamedTuple):
    total: int
    used: int
    free: int


@pytest.fixture
def entries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CacheEntries:
    """Return an empty cache."""
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.delenv(LIMIT_VARIABLE, raising=False)
    return CacheEntries(tmp_path / "cache")


def _keep(entries: CacheEntries, key: str, used: float) -> None:
    entries.stages.parent.mkdir(exist_ok=True)
    entries.write("export", key, "model", 1.0, key.encode() * (SIZE // len(key)), entries.stages.parent, [])
    os.utime(entries.stages / f"{key}.json", (used, used))


def _kept(entries: CacheEntries) -> set[str]:
    return {entry.key for entry, _ in entries.all()}


@pytest.mark.parametrize("fails", [False, True])
def test_bounded_cache_prunes_to_its_limit_after_a_build(
    fails: bool, entries: CacheEntries, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The entries used last stay; a failed build caches its stages too."""
    monkeypatch.setenv(LIMIT_VARIABLE, str(2.5 * SIZE / 1e9))
    try:
        with bounded_cache():
            for used, key in enumerate(("old", "newer", "newest")):
                _keep(entries, key, used)
            assert _kept(entries) == {"old", "newer", "newest"}
            if fails:
                raise VerificationError("it answers otherwise")
    except VerificationError:
        assert fails
    assert _kept(entries) == {"newer", "newest"}
    assert len(list(entries.blobs.iterdir())) == 2


def test_cache_skips_a_stage_larger_than_its_limit(entries: CacheEntries, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not evict the others either."""
    _keep(entries, "small", 1)
    monkeypatch.setenv(LIMIT_VARIABLE, str(1.5 * SIZE / 1e9))
    with bounded_cache():
        entries.write("export", "large", "model", 1.0, b"l" * 2 * SIZE, entries.stages.parent, [])
    assert _kept(entries) == {"small"}


@pytest.mark.parametrize(("disk", "most"), [(10**12, 20e9), (50 * 10**9, 5e9)])
def test_cache_limit_defaults_to_20_gb_or_a_tenth_of_the_disk(
    disk: int, most: float, entries: CacheEntries, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder need not exist yet."""
    there = entries.stages.parent.parent
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Disk(disk if path == there else 0, 0, disk))
    assert max_cache_bytes() == most


def test_cache_evicts_old_stages_for_those_of_a_build(
    entries: CacheEntries, checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(LIMIT_VARIABLE, "0.01")
    entries.stages.parent.mkdir()
    entries.write("export", "old", "model", 1.0, b"o" * 9_990_000, tmp_path, [])
    os.utime(entries.stages / "old.json", (0, 0))
    build(make_spec(model=str(checkpoint("topics")), name="m", output=tmp_path / "repository"))
    assert {(entry.stage, entry.model) for entry, _ in entries.all()} == {
        (stage, "m") for stage in ("export", "reference", "fuse", "verify", "select")
    }


@pytest.mark.parametrize("stated", ["much", "-1", "nan", "inf"])
def test_build_refuses_an_invalid_cache_limit_first(
    stated: str, entries: CacheEntries, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(LIMIT_VARIABLE, stated)
    with pytest.raises(SpecError, match=rf"BUILD_REPO_CACHE_GB is '{stated}'; expected how many"):
        build(make_spec(model="nowhere", output=tmp_path / "repository"))


def test_bounded_cache_ignores_the_limit_if_the_cache_is_off(
    entries: CacheEntries, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, "off")
    monkeypatch.setenv(LIMIT_VARIABLE, "much")
    with bounded_cache():
        pass


def test_cache_command_prints_the_limit(
    entries: CacheEntries, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(LIMIT_VARIABLE, "7.5")
    assert main(["cache"]) == 0
    assert "stages of at most 7.5 GB" in " ".join(capsys.readouterr().out.split())
