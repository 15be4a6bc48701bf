"""`scripts/containers`, without an engine: what it refuses, changes in manifests, and reads from a cgroup."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from builder.clusters.deploy.objects import objects
from builder.common.releases import NEWEST
from builder.repository.config.arguments import arguments
from builder.serving.server.embedded import EMBEDDED
from builder.serving.server.triton import Ports
from scripts.container_trial import __main__ as trial
from scripts.container_trial.compose import IMAGES, change_services
from scripts.container_trial.containers import MemoryUse, read_memory
from scripts.container_trial.engine import Engine, TrialError
from scripts.container_trial.pod import ONLY_KUBERNETES, playable
from scripts.container_trial.traffic import Answers, ask_all
from tests.clusters.deploy.deployments import STORED

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
    assert "sevre is none of serve, compose, pod, replace" in capsys.readouterr().err


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
    documents, changes = playable(written)
    *claims, played = documents
    assert [container["name"] for container in played["spec"]["initContainers"]] == ["pull"]
    assert [container["name"] for container in played["spec"]["containers"]] == ["triton", "gateway"]
    left = fields - {field for part in _parts(played["spec"]) for field in part}
    assert left == {*ONLY_KUBERNETES, "restartPolicy"}
    assert all(field in changes[-1] for field in ONLY_KUBERNETES)
    (triton,) = [container for container in played["spec"]["containers"] if container["name"] == "triton"]
    assert "--model-repository=/models/models" in triton["args"]
    assert triton["resources"]["limits"]["memory"] == STORED.size.memory + STORED.size.shm
    assert [claim["metadata"]["name"] for claim in claims] == ["tmp", "models"]
    kinds = [claim["metadata"]["annotations"].get("volume.podman.io/type") for claim in claims]
    assert kinds == ["tmpfs", None], "a tmpfs of the models would be empty after the pull"


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

    def do_POST(self) -> None:
        (text,) = json.loads(self.rfile.read(int(self.headers["content-length"])))["input"]
        vectors = {"right": [1.0, 0.0], "wrong": [0.6, 0.8]}
        content = json.dumps({"data": [{"embedding": vectors.get(text)}]}).encode()
        self.send_response(200 if text in vectors else 503)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def gateway() -> Iterator[int]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Gateway) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


@pytest.mark.parametrize(
    ("texts", "error"),
    [
        (["right"], None),
        (["right", "wrong"], "cosine to PyTorch is 0.6"),
        (["right", "refused"], "1 of 2 requests failed: TrialError: status 503"),
    ],
)
def test_answers_are_compared_with_pytorch(gateway: int, texts: list[str], error: str | None) -> None:
    load = ask_all("127.0.0.1", gateway, Answers(dict.fromkeys(texts, np.array([1.0, 0.0], np.float32))))
    if error is None:
        load.require(len(texts))
    else:
        with pytest.raises(TrialError, match=error):
            load.require(len(texts))
