"""A hung Triton, simulated by SIGSTOP: it runs and does not answer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from builder.clusters.ray.replica import TRITON_ENDED
from builder.serving.client.client import Client
from builder.serving.server.stubs import Stubs
from tests.served.patience import comes_about
from tests.serving.commands import descendants, put_echo, serving


@pytest.mark.parametrize("killed", [False, True])
def test_serve_ends_at_the_second_signal_though_triton_hangs(tmp_path: Path, killed: bool) -> None:
    """Regression: closing the pipe deadlocked with the thread that read it, while Triton's orphans kept it open."""
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


def test_serve_starts_a_hung_triton_again(tmp_path: Path) -> None:
    """Regression: the process was alive, and no request checked if it answers."""
    with serving(put_echo(tmp_path / "model_repository"), tmp_path / "output") as served:
        hung = served.triton
        os.kill(hung, signal.SIGSTOP)
        served.wait_until_ready(times=2)
        assert served.triton != hung
        with Client(f"127.0.0.1:{served.ports.grpc}", "echo") as client:
            assert client.ask({"text_input": "a"}) == {"label": "a"}
    assert "did not answer" in served.output


def test_serve_leaves_no_zombie_of_a_killed_model(tmp_path: Path) -> None:
    with serving(put_echo(tmp_path / "model_repository"), tmp_path / "output") as served:
        (killed,) = [stub.pid for stub in Stubs(served.triton).find() if stub.model == "echo"]
        os.kill(killed, signal.SIGKILL)
        assert comes_about(lambda: "loaded again in" in served.output)
        assert comes_about(lambda: not Path(f"/proc/{killed}").exists(), 60)


ENDS = """
import sys
from pathlib import Path
from builder.clusters.ray.cluster import RayOptions
from builder.clusters.ray.registry import Registry
from builder.clusters.ray.replica import TritonReplica
from builder.serving.server import heartbeat
heartbeat.PERIOD_S, heartbeat.REQUEST_TIMEOUT_S = 0.2, 2.0
from tests.clusters.ray.fake_store import FakeStore
replica = TritonReplica(RayOptions(repository=sys.argv[1]), Registry("models", FakeStore()))
print("Triton", replica.server.process.pid, flush=True)
sys.stdin.read()
"""


def test_ray_replica_exits_when_its_triton_hangs(tmp_path: Path) -> None:
    """Ray then starts another replica."""
    command = [sys.executable, "-c", ENDS, str(put_echo(tmp_path / "model_repository"))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            triton = int(process.stdout.readline().split()[1])
            os.kill(triton, signal.SIGSTOP)
            assert process.wait(120) == TRITON_ENDED
            assert comes_about(lambda: not Path(f"/proc/{triton}").exists(), 60)
        finally:
            process.kill()
