"""A Triton that lives and does not answer: one that is stopped by a signal is exactly that."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.serve.commands import descendants, put_echo, serving
from tests.served.patience import comes_about


@pytest.mark.parametrize("killed", [False, True])
def test_serve_ends_at_the_second_signal_though_triton_hangs(tmp_path: Path, killed: bool) -> None:
    """Regression: it closed the pipe that a thread read and Triton's orphans wrote to, and waited for both for ever."""
    with serving(put_echo(tmp_path / "model_repository"), tmp_path / "output") as served:
        left, triton = descendants(served.process.pid), served.triton
        assert len(left) >= 2, "Triton and the process of its model"
        os.kill(triton, signal.SIGSTOP)
        served.process.terminate()
        with pytest.raises(subprocess.TimeoutExpired):
            served.process.wait(1)
        if killed:
            os.kill(triton, signal.SIGKILL)
        else:
            served.process.terminate()
        served.process.wait(60)
        assert comes_about(lambda: not [pid for pid in left if Path(f"/proc/{pid}").exists()], 60)
