"""Processes of models that outlive their Triton."""

from __future__ import annotations

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
