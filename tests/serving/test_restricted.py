"""The options of the deployment files on a real server, as far as the embedded release knows them."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import tritonclient.grpc as grpc
from tritonclient.utils import InferenceServerException

from builder.serving.server.embedded import wheel_folder
from builder.serving.server.triton import Ports
from tests.clusters.test_deployment import SERVICES
from tests.serving.embedded import embedded_options, empty_server

KEY = "a secret"
LOGGING, REGIONS = "/v2/logging", "/v2/systemsharedmemory/status"


@pytest.fixture(scope="module")
def ports(module_folder: Callable[[str], Path]) -> Iterator[Ports]:
    """Run a server with the options of docker-compose.yml."""
    script, _, *options = SERVICES["triton"]["command"][2:]
    (line,) = [line for line in script.splitlines() if line.startswith("restricted=")]
    restricted = line.split('"')[1].split("$")[0] + KEY
    options += [f"--{name}={restricted}" for name in ("grpc-restricted-protocol", "http-restricted-api")]
    known = embedded_options()
    passed = [o for o in options if o.split("=")[0].removeprefix("--") in known and "model-repository" not in o]
    assert len(passed) >= 5
    with empty_server([*passed, f"--cache-directory={wheel_folder() / 'caches'}"], module_folder("empty")) as ports:
        yield ports


def _status(ports: Ports, path: str, headers: dict[str, str], body: bytes | None = None) -> int:
    request = urllib.request.Request(f"http://127.0.0.1:{ports.http}{path}", headers=headers, data=body)
    try:
        with urllib.request.urlopen(request, timeout=300) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


@pytest.mark.parametrize("path", [LOGGING, REGIONS, "/v2/trace/setting", "/v2/cudasharedmemory/status"])
def test_triton_refuses_server_changes_without_the_key(path: str, ports: Ports) -> None:
    assert _status(ports, path, {}) == 403
    assert _status(ports, path, {"triton-admin-key": "guessed"}) == 403
    assert _status(ports, path, {"triton-admin-key": KEY}) == 200


def test_restricted_grpc_protocol_needs_the_key(ports: Ports) -> None:
    with grpc.InferenceServerClient(f"127.0.0.1:{ports.grpc}") as client:
        with pytest.raises(InferenceServerException, match="restricted"):
            client.register_system_shared_memory("mine", "/anything", 8)
        with pytest.raises(InferenceServerException, match="restricted"):
            client.update_log_settings({"log_verbose_level": 9})
        header = {"triton-grpc-protocol-triton-admin-key": KEY}
        assert client.get_system_shared_memory_status(headers=header).regions == {}


def test_health_and_repository_apis_need_no_key(ports: Ports) -> None:
    assert _status(ports, "/v2/health/ready", {}) == 200
    assert _status(ports, "/v2/repository/index", {}, b"{}") == 200
    assert _status(ports, "/v2/repository/models/any/load", {}, b"{}") == 503, "no model is loaded by a client"
