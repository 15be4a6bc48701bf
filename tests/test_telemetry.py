"""Builds and served models send no telemetry and write only to their folders."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from builder.common.telemetry import OFF
from tests.decoders import make_decoder_checkpoint
from tests.tiny_encoders import make_checkpoint

ROOT = Path(__file__).parent.parent
RUNTIME = ROOT / "builder" / "runtime"
ISOLATED = ["unshare", "--net"]
SESSION = """
import numpy as np, onnx
{statement}
value = onnx.helper.make_tensor_value_info
node = onnx.helper.make_node("Abs", ["x"], ["y"])
graph = onnx.helper.make_graph([node], "g", [value("x", 1, [1])], [value("y", 1, [1])])
model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 20)], ir_version=10)
session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
session.run(None, {{"x": np.zeros(1, np.float32)}})
"""
BUILD_AND_SERVE = """
import json, sys
from pathlib import Path
from builder import Client, build, make_spec, running
from builder.building.variants import timing, traffic
from builder.common.machine import cpu
from builder.engines.openvino import arithmetic_on

def lost():
    # what the kernel could not send: no route, or a name server that is not there
    rows = [line.split() for line in Path("/proc/net/snmp").read_text().splitlines()]
    counts = {f"{names[0]}{name}": int(value) for names, values in zip(rows[::2], rows[1::2])
              for name, value in zip(names[1:], values[1:])}
    newer = dict(line.split() for line in Path("/proc/net/snmp6").read_text().splitlines())
    return {"Ip": counts["Ip:OutNoRoutes"], "Udp": counts["Udp:NoPorts"], "Ip6": int(newer["Ip6OutNoRoutes"])}

timing.MEASURED_S = traffic.MAX_MEASURED_S = 0.0  # times do not matter here
work = Path(sys.argv[1])
before = lost()
for name in ("encoder", "decoder"):
    build(make_spec(model=str(work / name), output=work / "repository", max_length=64))
# a build refuses fp32 where OpenVINO multiplies in bf16
other = {"name": "other", "engine": "openvino", "precision": arithmetic_on(cpu()["flags"])}
build(make_spec(model=str(work / "encoder"), output=work / "repository", max_length=64, **other))
with running(work / "repository") as server:
    with Client(server.url, "encoder") as encoder, Client(server.url, "decoder") as decoder:
        with Client(server.url, "other") as other:
            other.ask({"text_input": "a small text"})
        answers = [encoder.ask({"text_input": "a small text"}), decoder.ask({"text_input": "a small", "max_tokens": 2})]
print(json.dumps({"before": before, "after": lost(), "answers": [sorted(answer) for answer in answers]}))
"""


def _plain_environment(home: Path) -> dict[str, str]:
    """Return the environment of a login shell: libraries disable telemetry if variables of CI are set."""
    (home / "tmp").mkdir(parents=True)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {"HOME": str(home), "PATH": path, "TMPDIR": str(home / "tmp"), "HF_HUB_OFFLINE": "1"}


def _files(home: Path) -> list[str]:
    return sorted(str(path.relative_to(home)) for path in home.rglob("*") if path.is_file())


@pytest.mark.parametrize("module", ["builder.runtime.sessions", "runtime.sessions"])
def test_onnx_runtime_session_has_no_telemetry(tmp_path: Path, module: str) -> None:
    """Test the module of the builder, and the emitted file."""
    folder = ROOT if module.startswith("builder") else RUNTIME.parent
    command = [sys.executable, "-c", SESSION.format(statement=f"from {module} import onnxruntime")]
    subprocess.run(command, cwd=folder, env=_plain_environment(tmp_path / "home"), check=True)
    assert _files(tmp_path / "home") == []


def test_onnx_runtime_writes_an_identifier_by_default(tmp_path: Path) -> None:
    """If this fails, the pinned ONNX Runtime has no telemetry anymore, and the other tests prove nothing."""
    command = [sys.executable, "-c", SESSION.format(statement="import onnxruntime")]
    subprocess.run(command, cwd=tmp_path, env=_plain_environment(tmp_path / "home"), check=True)
    assert any("onnxruntime" in name for name in _files(tmp_path / "home"))


@pytest.mark.slow
def test_build_and_served_model_send_nothing(tmp_path: Path) -> None:
    """Run in a network namespace without a route, where the kernel counts packets that it could not send."""
    if subprocess.run([*ISOLATED, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no network namespace can be made here: unshare --net needs privileges")
    make_checkpoint(tmp_path / "encoder", "bert", "feature-extraction")
    make_decoder_checkpoint(tmp_path / "decoder", "qwen3")
    home = tmp_path / "home"
    command = [*ISOLATED, "sh", "-c", 'ip link set lo up && exec "$@"', "sh", sys.executable, "-c", BUILD_AND_SERVE]
    done = subprocess.run(
        [*command, str(tmp_path)], cwd=ROOT, env=_plain_environment(home), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["after"] == result["before"]
    assert ["embedding" in result["answers"][0], "text_output" in result["answers"][1]] == [True, True]
    assert [name for name in _files(home) if not name.startswith(".cache/build-repo/")] == []


def test_containers_disable_telemetry() -> None:
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    for name in ("triton", "triton-gpu", "triton-vllm", "triton-trtllm"):
        assert OFF.items() <= services[name]["environment"].items()
    assert services["grafana"]["environment"]["GF_ANALYTICS_REPORTING_ENABLED"] == "false"
