"""The memory available to a container."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from builder.common import machine


@pytest.fixture(autouse=True)
def _machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = SimpleNamespace(available=512_000, total=512_000)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    monkeypatch.setattr(machine, "CGROUP", tmp_path)
    (tmp_path / "memory.current").write_text("9000\n")
    (tmp_path / "memory.stat").write_text("anon 6000\nfile 3000\ninactive_file 2000\nactive_file 500\n")


def test_available_memory_counts_the_page_cache_of_a_container(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("16000\n")
    assert machine.available_memory() == 16_000 - 9000 + 2500
    assert machine.total_memory() == 16_000, "more than the container has is never there"
    (tmp_path / "memory.max").write_text("6000\n")
    assert machine.available_memory() == 0, "a limit may be lowered below what is used"


def test_available_memory_is_the_machines_without_a_lower_limit(tmp_path: Path) -> None:
    assert machine.available_memory() == 512_000, "no cgroup v2"
    (tmp_path / "memory.max").write_text("max\n")
    assert machine.available_memory() == 512_000
    (tmp_path / "memory.max").write_text("1000000\n")
    assert machine.available_memory() == 512_000, "the limit is above what the machine has"
    assert machine.total_memory() == 512_000


def test_available_memory_respects_a_cgroup_v1_limit(tmp_path: Path) -> None:
    """Regression: under cgroup v1, which uses other files, a build assumed all of the machine's memory."""
    folder = tmp_path / "memory"
    folder.mkdir()
    (folder / "memory.usage_in_bytes").write_text("9000\n")
    counts = "active_file 1\nhierarchical_memory_limit {}\ntotal_inactive_file 2000\ntotal_active_file 500\n"
    (folder / "memory.stat").write_text(counts.format(16_000))
    assert machine.available_memory() == 16_000 - 9000 + 2500
    assert machine.total_memory() == 16_000
    (folder / "memory.stat").write_text(counts.format(9_223_372_036_854_771_712))
    assert (machine.available_memory(), machine.total_memory()) == (512_000, 512_000), "no limit"
