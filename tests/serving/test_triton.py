"""Servers that cannot start are refused in one line before any process starts."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from builder.commands.gateway import ADMIN_KEY_VARIABLE, KEYS_VARIABLE, LIMITS_VARIABLE
from builder.commands.serve import LoadCount
from builder.common.addresses import address_family
from builder.common.errors import RepositoryError, ServeError
from builder.common.workplace import PREFIX
from builder.serving.load import perf_analyzer
from builder.serving.server import refusals, triton
from builder.serving.server.embedded import BACKENDS, prepare_embedded
from builder.serving.server.triton import FREE_PORTS, free_ports, running

LOOPBACK_IPV6 = "::1"


def test_free_ports_are_distinct_for_concurrent_servers() -> None:
    """Ports are outside the ephemeral range, so that no client gets one before the server binds it."""
    ports = [port for _ in range(10) for port in vars(free_ports()).values()]
    assert len(set(ports)) == 30
    assert set(ports) <= set(FREE_PORTS)


def test_free_ports_skip_a_port_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_ports().http
    monkeypatch.setattr(triton, "_next_ports", itertools.count(FREE_PORTS.index(port)))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        assert port not in vars(free_ports()).values()


NOT_AN_ERROR = [
    'E1128 08:00:00.1 7 server.cc:241] "CudaDriverHelper has not been initialized."',
    "Error: Failed to initialize NVML",
]
ABORT = ["terminate called after throwing an instance of 'boost::interprocess::lock_exception'", "  what():  boost"]


def test_server_that_aborts_is_told_by_its_last_lines() -> None:
    """Regression: a start that ended by SIGABRT was explained by a line of every machine without a GPU."""
    reason = triton.start_failure(["I1128 loading", *NOT_AN_ERROR, *ABORT], -6)
    assert reason.startswith("Triton stopped, by SIGABRT: it gave no reason, and its last lines were: I1128 loading | ")
    assert "lock_exception' | what():  boost" in reason
    real = 'E1128 08:00:01.1 7 main.cc:257] "failed to start HTTP service"'
    assert triton.start_failure([real, *NOT_AN_ERROR], 1).startswith(
        'Triton stopped, with status 1: "failed to start HTTP service"'
    )


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Return a folder that looks like a repository; most tests fail before loading it."""
    folder = tmp_path / "model_repository"
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "config.pbtxt").write_text('name: "model"')
    return folder


def _refused(repository: Path, message: str, **options: Any) -> None:
    with pytest.raises(ServeError, match=message), running(repository, **options):
        pytest.fail("it started")


def test_triton_refuses_a_repository_without_models(tmp_path: Path) -> None:
    _refused(tmp_path, "holds no model; build one first: build-repo MODEL")


def test_triton_refuses_too_small_shared_memory(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refusals, "SHARED_MEMORY_NEEDED", 1 << 60)
    _refused(repository, r"/dev/shm has \d+ MB free; the Python backend needs .* --shm-size")


def test_triton_refuses_a_platform_without_a_wheel(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    _refused(repository, "no tritonserver for .* docker compose --profile cpu up")


def test_triton_refuses_a_python_without_a_stub(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", type("Version", (), {"major": 3, "minor": 99})())
    _refused(repository, r"no Python backend for Python 3\.99")


def test_triton_refuses_numpy_2(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(np, "__version__", "2.1.0")
    _refused(repository, "install numpy<2")


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.7", "::"])
def test_triton_refuses_a_public_address_without_insecure_bind(host: str, tmp_path: Path) -> None:
    _refused(tmp_path, rf"does not listen on {host}: .*CVE-2025-23319.* --insecure-bind", host=host)
    _refused(tmp_path, "holds no model", host="0.0.0.0", insecure_bind=True)


def test_triton_names_a_model_that_does_not_load(repository: Path) -> None:
    (repository / "model" / "config.pbtxt").write_text('name: "model" backend: "python" max_batch_size: 1')
    (repository / "model" / "1").mkdir()
    (repository / "model" / "1" / "model.py").write_text("import no_such_module\n")
    _refused(repository, "the model model does not load: .*no_such_module.* build-repo check")


def _is_usable(host: str) -> bool:
    """Return True if this machine has the address."""
    with socket.socket(address_family(host)) as probe, contextlib.suppress(OSError):
        probe.bind((host, 0))
        return True
    return False


def test_triton_has_no_secrets_of_the_gateway(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: with `serve`, the Python of every model had the clients' keys in its environment."""
    for name in (KEYS_VARIABLE, ADMIN_KEY_VARIABLE, LIMITS_VARIABLE):
        monkeypatch.setenv(name, "a secret")
    assert "a secret" not in prepare_embedded(repository, tmp_path / "files", BACKENDS).environment.values()


def test_triton_removes_the_files_of_one_that_was_killed(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: each kill of a replica left 3 MB in /tmp."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    left = tmp_path / f"{PREFIX}left"
    left.mkdir()
    os.utime(left, (0, 0))
    monkeypatch.setattr(sys, "version_info", type("Version", (), {"major": 3, "minor": 99})())
    _refused(repository, "no Python backend")
    assert not left.exists()


def test_triton_serves_other_models_beside_an_unreadable_configuration(repository: Path) -> None:
    """The server listens on an address of IPv6, as replicas on such nodes do."""
    (repository / "model" / "config.pbtxt").write_text('name: "model" backend: "python" max_batch_size: 1')
    (repository / "model" / "1").mkdir()
    program = "class TritonPythonModel:\n    def execute(self, requests):\n        return []\n"
    (repository / "model" / "1" / "model.py").write_text(program)
    (repository / "broken").mkdir()
    (repository / "broken" / "config.pbtxt").write_text("name: 7 {")
    host = LOOPBACK_IPV6 if _is_usable(LOOPBACK_IPV6) else "127.0.0.1"
    with running(repository, host, strict=False) as server:
        if host == LOOPBACK_IPV6:
            assert server.url.startswith("[::1]:")
        broken, model = sorted(server.models(), key=lambda model: model.name)
    assert (model.name, model.state) == ("model", "READY")
    assert broken.state != "READY"
    assert "cannot read its config.pbtxt" in broken.reason
    with pytest.raises(RepositoryError, match=r"config\.pbtxt of broken is not a Triton"), running(repository):
        pytest.fail("it started")


def test_triton_refuses_a_folder_without_backends(repository: Path, tmp_path: Path) -> None:
    _refused(repository, r"holds no backend: expected NAME/libtriton_NAME\.so in it", backends=tmp_path / "absent")


def test_triton_uses_the_backends_of_a_given_folder(repository: Path, tmp_path: Path) -> None:
    """The server opens the invalid library in that folder, and finds no other backend."""
    library = tmp_path / "backends" / "onnxruntime" / "libtriton_onnxruntime.so"
    library.parent.mkdir(parents=True)
    library.write_text("not a library")
    (repository / "model" / "1").mkdir()
    config = repository / "model" / "config.pbtxt"
    config.write_text('name: "model" backend: "onnxruntime" max_batch_size: 1')
    _refused(repository, "the model model does not load: .*shared library", backends=tmp_path / "backends")
    config.write_text('name: "model" backend: "openvino" max_batch_size: 1')
    _refused(repository, "model: the embedded Triton has no openvino", backends=tmp_path / "backends")


def test_find_perf_analyzer_reports_a_failed_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BUILD_REPO_CACHE", str(tmp_path))
    monkeypatch.setattr(shutil, "which", lambda name: None)
    failed = subprocess.CompletedProcess([], 1, "", "no network\n")
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: failed)
    with pytest.raises(ServeError, match=r"could not be fetched \(no network\): put perf_analyzer on PATH"):
        perf_analyzer.find_perf_analyzer()
    assert not list(tmp_path.rglob("perf_analyzer"))


def test_load_count_names_each_model_once(tmp_path: Path) -> None:
    """Several versions of a model are loaded one by one, and a model beside the repository does not count."""
    for name in ("embeds", "embeds_model"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.pbtxt").touch()
    shown: list[str] = []
    count = LoadCount(tmp_path, shown.append)
    for name in ("embeds_model", "embeds_model", "build_repo_liveness", "embeds"):
        count.read(f"I1129 03:00:00.310000 1 model_lifecycle.cc:839] \"successfully loaded '{name}'\"")
    assert shown == [f"starting Triton, {loaded} of 2 models are loaded" for loaded in (1, 2)]
