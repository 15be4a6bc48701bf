"""Counts of /proc in bytes."""

from __future__ import annotations

from pathlib import Path

import pytest

from builder.common import processes as proc
from builder.common.processes import read_counter


def test_read_counter_converts_kilobytes_of_a_field_to_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proc, "PROC", tmp_path)
    (tmp_path / "meminfo").write_text("MemTotal:       16 kB\nMemAvailable:    3 kB\n")
    assert (read_counter("meminfo", "MemTotal"), read_counter("meminfo", "MemAvailable")) == (16384, 3072)
    assert read_counter("meminfo", "Mem") is None, "a field is not the beginning of another"


def test_read_counter_returns_none_for_an_ended_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proc, "PROC", tmp_path)
    assert read_counter("1/smaps_rollup", "Pss") is None
