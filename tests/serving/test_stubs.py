"""Processes of models that outlive their Triton."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from builder.serving.server import stubs
from tests.served.patience import comes_about

MODEL = "import sys, time; print(*sys.argv[1:], flush=True); time.sleep(600)"


def test_stub_of_a_killed_triton_is_ended_with_its_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: it kept 77 MB, because its watchdog can wait for a lock that the killed server had."""
    monkeypatch.setattr(stubs, "SHARED_MEMORY", tmp_path)
    server, model, region = tmp_path / "tritonserver", tmp_path / "model.py", tmp_path / "build_repo_abc_1"
    server.symlink_to(shutil.which("bash") or "/bin/bash")
    model.write_text(MODEL)
    region.touch()
    os.utime(region, (0, 0))
    command = ["exec", "-a", f"/backends/{stubs.STUB}", sys.executable, str(model), region.name]
    with subprocess.Popen(
        [server, "-c", f"({shlex.join(command)}) & wait"], stdout=subprocess.PIPE, text=True
    ) as triton:
        assert triton.stdout is not None
        assert triton.stdout.readline().strip() == region.name
        (stub,) = psutil.Process(triton.pid).children()
        try:
            stubs.end_orphans()
            assert stub.is_running(), "its server lives"
            assert region.exists()
            triton.kill()
            assert comes_about(lambda: psutil.Process(triton.pid).status() == psutil.STATUS_ZOMBIE)
            stubs.end_orphans()
            assert comes_about(lambda: not stub.is_running() or stub.status() == psutil.STATUS_ZOMBIE)
            assert not region.exists()
        finally:
            stub.kill()


def test_memory_of_tritons_that_are_gone_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: where the whole process tree was killed, its memory stayed: 5 MB for each server."""
    monkeypatch.setattr(stubs, "SHARED_MEMORY", tmp_path)
    old, young, foreign, used = (
        tmp_path / name for name in ("build_repo_old_a-b", "build_repo_young_a-b", "another_a-b", "build_repo_used_a-b")
    )
    for region in (old, young, foreign, used):
        region.touch()
        os.utime(region, None if region == young else (0, 0))
    option = "--backend-config=python,shm-region-prefix-name=build_repo_used_"
    with subprocess.Popen([sys.executable, "-c", MODEL, option], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        assert server.stdout.readline().strip() == option
        try:
            stubs.end_orphans()
        finally:
            server.kill()
    assert sorted(tmp_path.iterdir()) == sorted([young, foreign, used])
