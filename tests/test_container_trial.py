"""`scripts/containers`, without an engine: what it refuses, changes in manifests, and reads from a cgroup."""

from __future__ import annotations

import http.server
import json
import socket
import struct
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import yaml

from builder.clusters.deploy.objects import objects
from builder.common.releases import NEWEST
from builder.options import PodOptions
from builder.repository.config.arguments import arguments
from builder.serving.server.embedded import EMBEDDED
from builder.serving.server.triton import Ports
from scripts.container_trial import __main__ as trial
from scripts.container_trial.compose import IMAGES, change_services
from scripts.container_trial.containers import MemoryUse, read_memory, wait_for
from scripts.container_trial.engine import Engine, TrialError
from scripts.container_trial.manifests import ONLY_KUBERNETES, playable
from scripts.container_trial.name_server import HeadlessService
from scripts.container_trial.traffic import Answers, ask_all, under_load
from tests.clusters.deploy.deployments import ON_DEMAND, STORED
from tests.http_servers import http_server

ROOT = Path(__file__).parents[1]


def test_containers_name_missing_packages_and_run_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(trial, "missing_packages", lambda: ["buildah", "runc"])
    with pytest.raises(SystemExit) as stopped:
        trial.main(["--folder", str(tmp_path / "images")])
    assert stopped.value.code == trial.NOT_HERE
    assert "apt-get install --no-install-recommends buildah runc" in capsys.readouterr().err
    assert not (tmp_path / "images").exists()


def test_containers_refuse_a_step_that_does_not_exist(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        trial.main(["sevre"])
    assert "sevre is none of serve, compose, pod, replace, on-demand" in capsys.readouterr().err


def test_containers_run_the_other_steps_when_one_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def fail(*_: object) -> str:
        raise TrialError("killed for memory")

    monkeypatch.setattr(Engine, "prepare", lambda self: "podman")
    for name in ("make_base", "build_images", "make_repository"):
        monkeypatch.setattr(trial, name, lambda *_: "made")
    monkeypatch.setattr(trial, "STEPS", {"serve": fail, "compose": lambda *_: "all answered"})
    assert trial.run_steps(Engine(tmp_path), "bookworm", None, ["serve", "compose"]) == trial.FAILED
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[-2:]] == [["FAILED", "serve"], ["passed", "compose"]]
    assert lines[-2].endswith("killed for memory")
    assert trial.run_steps(Engine(tmp_path), "bookworm", None, ["compose"]) == 0


def test_containers_fail_when_something_is_left_but_remove_the_rest(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Regression: the status was 0, and what came after the first failure was left as well."""
    ran: list[str] = []

    def run(self: Engine, *command: str | Path, timeout: float = 0) -> str:
        ran.append(" ".join(map(str, command)))
        if ran[-1].startswith("podman pod rm"):
            raise TrialError("the pod is busy")
        return "localhost/build-repo-trial/pull:trial" if ran[-1].startswith("podman images") else ""

    monkeypatch.setattr(Engine, "run", run)
    monkeypatch.setattr(trial, "_reasons_not_to_start", list)
    monkeypatch.setattr(trial, "run_steps", lambda *_: 0)
    assert trial.main(["--folder", str(tmp_path)]) == trial.FAILED
    assert capsys.readouterr().out.startswith("FAILED  clean")
    assert "podman rmi --force localhost/build-repo-trial/pull:trial" in ran
    assert ran[-1] == "podman image prune --force"


def test_compose_trial_removes_only_arguments_of_newer_releases() -> None:
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    removed = change_services(services, Ports())
    assert removed == [word for word in arguments(NEWEST) if word not in arguments(EMBEDDED)] != []
    assert services["triton"]["command"][-len(arguments(EMBEDDED)) :] == arguments(EMBEDDED)
    assert {name: services[name]["image"] for name in IMAGES} == IMAGES
    assert not any("build" in services[name] for name in IMAGES)


def test_pod_trial_names_every_field_that_it_leaves_out() -> None:
    written = json.loads(json.dumps(objects(STORED)["deployment"]))
    fields = {field for part in _parts(written["spec"]["template"]["spec"]) for field in part}
    documents, changes = playable(written, "models")
    *claims, played = documents
    assert [container["name"] for container in played["spec"]["initContainers"]] == ["pull"]
    assert [container["name"] for container in played["spec"]["containers"]] == ["triton", "gateway"]
    left = fields - {field for part in _parts(played["spec"]) for field in part}
    assert left == set(ONLY_KUBERNETES)
    assert played["spec"]["restartPolicy"] == "OnFailure"
    assert not any("restartPolicy" in container for container in _parts(played["spec"])[1:])
    assert all(field in changes[-1] for field in ONLY_KUBERNETES)
    (triton,) = [container for container in played["spec"]["containers"] if container["name"] == "triton"]
    assert "--model-repository=/models/models" in triton["args"]
    assert triton["resources"]["limits"]["memory"] == STORED.size.memory + STORED.size.shm
    assert [claim["metadata"]["name"] for claim in claims] == ["models-tmp", "models-models"]
    kinds = [claim["metadata"]["annotations"].get("volume.podman.io/type") for claim in claims]
    assert kinds == ["tmpfs", None], "a tmpfs of the models would be empty after the pull"


def test_on_demand_trial_plays_both_deployments_on_one_claim() -> None:
    written = json.loads(json.dumps(objects(replace(ON_DEMAND, pod=PodOptions(models_claim="pulled")))))
    (*claims, triton), changes = playable(written["tritons"], "tritons-1")
    assert [claim["metadata"]["name"] for claim in claims] == ["tritons-1-tmp", "pulled"]
    assert not any("sidecar" in change for change in changes)
    (container,) = triton["spec"]["containers"]
    assert {"--model-control-mode=explicit", "--model-repository=/models/models"} <= set(container["args"])
    (*claims, gateway), _ = playable(written["deployment"], "gateway-1")
    assert [claim["metadata"]["name"] for claim in claims] == ["gateway-1-tmp", "gateway-1-models"]
    (container,) = gateway["spec"]["containers"]
    assert {"--repository=/models/models", "--url=dns:///search-tritons:8001"} <= set(container["args"])


def test_name_server_answers_with_the_ready_pods_alone() -> None:
    """Ask as glibc does: for a name with a search domain, with EDNS behind it."""
    service = HeadlessService("tritons", "127.0.0.1", 0)
    service.addresses |= {"10.0.0.2", "10.0.0.1"}
    name = b"\x07tritons\x03svc\x00"
    edns = b"\x00\x00\x29\x04\xb0\x00\x00\x00\x00\x00\x00"

    def ask(question: bytes, kind: int) -> bytes:
        header = struct.pack("!6H", 7, 0x0100, 1, 0, 0, 1)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
            client.settimeout(60)
            client.sendto(header + question + struct.pack("!HH", kind, 1) + edns, service.server_address)
            answer = client.recv(512)
        assert struct.unpack_from("!HHH", answer)[0::2] == (7, 1)
        assert answer[12 : 12 + len(question)] == question
        return answer

    with service.running():
        answer = ask(name, 1)
        assert [answer[-20:-16], answer[-4:]] == [b"\x0a\x00\x00\x01", b"\x0a\x00\x00\x02"]
        service.addresses.remove("10.0.0.1")
        assert struct.unpack_from("!H", ask(name, 1), 6) == (1,)
        assert struct.unpack_from("!H", ask(name, 28), 6) == (0,), "no IPv6"
        assert ask(b"\x05other\x00", 1)[3] & 15 == 3, "there is no such name"


def _parts(spec: dict[str, Any]) -> list[dict[str, Any]]:
    return [spec, *spec["initContainers"], *spec["containers"]]


@pytest.mark.parametrize(
    "files",
    [
        {
            "memory.limit_in_bytes": "500",
            "memory.max_usage_in_bytes": "450",
            "memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 2",
            "memory.stat": "rss 1\ntotal_rss 200\ntotal_shmem 100",
        },
        {
            "memory.max": "500",
            "memory.peak": "450",
            "memory.events": "low 0\noom 3\noom_kill 2\noom_group_kill 0",
            "memory.stat": "anon 200\nfile 999\nshmem 100",
        },
    ],
    ids=["v1", "v2"],
)
def test_memory_is_read_from_both_versions_of_cgroups(files: dict[str, str], tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(f"{text}\n")
    assert read_memory(tmp_path) == MemoryUse(limit=500, peak=450, anonymous=300, kills=2)


class Gateway(http.server.BaseHTTPRequestHandler):
    """Answer `right` with its vector, `wrong` with another one, everything else with an error."""

    protocol_version = "HTTP/1.1"
    asked: ClassVar[set[tuple[str, str]]] = set()  # models, and the hosts that were asked for them

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.asked.add((request["model"], self.headers["host"]))
        texts, vectors = request["input"], {"right": [1.0, 0.0], "wrong": [0.6, 0.8]}
        content = json.dumps({"data": [{"embedding": vectors.get(text)} for text in texts]}).encode()
        self.send_response(200 if set(texts) <= set(vectors) else 503)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def gateway() -> Iterator[int]:
    with http_server(Gateway) as port:
        yield port


@pytest.mark.parametrize(
    ("texts", "error"),
    [
        (["right"], None),
        (["right", "wrong"], "cosine to PyTorch is 0.6"),
        (["right", "refused"], "1 of 2 requests failed: minilm after 0 s: TrialError: status 503"),
    ],
)
def test_answers_are_compared_with_pytorch(gateway: int, texts: list[str], error: str | None) -> None:
    load = ask_all("127.0.0.1", gateway, Answers(dict.fromkeys(texts, np.array([1.0, 0.0], np.float32))))
    if error is None:
        load.require(len(texts))
    else:
        with pytest.raises(TrialError, match=error):
            load.require(len(texts))


def test_clients_ask_every_gateway_and_every_model(gateway: int) -> None:
    vectors, hosts = {"right": np.array([1.0, 0.0], np.float32)}, ["127.0.0.1", "localhost"]
    expected = {(model, f"{host}:{gateway}") for model, host in product(("one", "two"), hosts)}
    with under_load(hosts, gateway, [Answers(vectors, "one"), Answers(vectors, "two")], len(hosts)) as load:
        assert wait_for(lambda: expected <= Gateway.asked, timeout=60, every=0.01)
    load.require(len(expected))
