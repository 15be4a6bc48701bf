"""Counts of /proc in bytes."""

from __future__ import annotations

from pathlib import Path

import pytest

from builder.common import processes as proc
from builder.common.processes import read_counter


def test_kilobytes_are_read_as_bytes_by_their_field(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proc, "PROC", tmp_path)
    (tmp_path / "meminfo").write_text("MemTotal:       16 kB\nMemAvailable:    3 kB\n")
    assert (read_counter("meminfo", "MemTotal"), read_counter("meminfo", "MemAvailable")) == (16384, 3072)
    assert read_counter("meminfo", "Mem") is None, "a field is not the beginning of another"


def test_nothing_is_counted_of_a_process_that_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proc, "PROC", tmp_path)
    assert read_counter("1/smaps_rollup", "Pss") is None
