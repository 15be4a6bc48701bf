"""Test how replicas and gateways exchange addresses and requests, and what Ray scales by, without a cluster."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from ray.exceptions import RayError

from builder.clusters.ray import gateway, registry, replica
from builder.clusters.ray.cluster import RayOptions
from builder.clusters.ray.gateway import GatewayReplica, ray_gateway
from builder.clusters.ray.registry import MAX_UNCHANGED_READS, Registry
from builder.clusters.ray.replica import TritonReplica
from builder.clusters.ray.scaling import replicas_for_requests
from builder.serving.gateway.fleet.targets import AddressFile, parse_targets
from builder.serving.server.triton import Ports, TritonServer
from tests.clusters.ray.fake_store import FakeStore
from tests.served.patience import comes_about

HOST = "127.0.0.1"
TRITON = f"{HOST}:8001"


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (registry, replica):
        monkeypatch.setattr(module, "PERIOD_S", 0.01)


@pytest.fixture
def store() -> FakeStore:
    return FakeStore()


def test_entries_are_read_until_they_are_removed(store: FakeStore) -> None:
    written, other = Registry("models", store), Registry("others", store)
    written.gateways.write("a", {TRITON: 3})
    assert Registry("models", store).gateways.read() == {"a": {TRITON: 3}}
    assert not other.gateways.read()
    assert not Registry("models", store).tritons.read()
    written.gateways.remove("a")
    assert not Registry("models", store).gateways.read()


def test_entry_that_is_not_written_any_more_dies(store: FakeStore) -> None:
    writer, reader = Registry("models", store).tritons, Registry("models", store).tritons
    writer.write("a:1")
    for _ in range(MAX_UNCHANGED_READS):
        writer.write("b:1")
        assert set(reader.read()) == {"a:1", "b:1"}
    assert set(reader.read()) == {"b:1"}
    assert len(store.values) == 1, "a dead entry is removed"
    writer.write("a:1")
    assert set(reader.read()) == {"a:1", "b:1"}, "its writer was only slow"


def test_no_entry_dies_while_the_head_is_away(store: FakeStore) -> None:
    tritons = Registry("models", store).tritons
    tritons.write("a:1")
    assert set(tritons.read()) == {"a:1"}
    store.is_away = True
    for _ in range(3 * MAX_UNCHANGED_READS):
        with pytest.raises(RayError):
            tritons.read()
    store.is_away = False
    assert set(tritons.read()) == {"a:1"}


@pytest.fixture
def followed(store: FakeStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[AddressFile]:
    """Run a gateway whose process is a stand-in; return the file that it would follow."""
    urls = list[str]()

    @contextmanager
    def supervised(url: str, *arguments: Any, say: Callable[[str], None]) -> Iterator[None]:
        urls.append(url)
        yield

    monkeypatch.setattr(gateway, "supervised_gateway", supervised)
    monkeypatch.setattr(registry, "MAX_UNCHANGED_READS", 10**9)  # the tests write once what others write regularly
    with ray_gateway(Registry("models", store), HOST, 9000, say=print):
        (target,) = parse_targets(urls[0])
        assert isinstance(target, AddressFile)
        yield target
    assert not Registry("models", store).gateways.read(), "replicas need not wait for a gateway that ended"


def test_gateway_follows_addresses_and_tells_its_requests(store: FakeStore, followed: AddressFile) -> None:
    replicas = Registry("models", store)
    replicas.tritons.write("a:1")
    assert comes_about(lambda: followed.read() == ["a:1"])
    followed.write_requests({"a:1": 5})
    assert comes_about(lambda: list(replicas.gateways.read().values()) == [{"a:1": 5}])


def test_requests_of_a_gateway_that_hangs_are_not_published_again(store: FakeStore, followed: AddressFile) -> None:
    """Regression: the last requests of a gateway that ended for good kept replicas running, and waiting for it."""
    gateways, tritons = Registry("models", store).gateways, Registry("models", store).tritons
    followed.write_requests({"a:1": 5})
    assert comes_about(lambda: bool(gateways.read()))
    published = [value for value, _ in gateways.read_before.values()]
    tritons.write("a:1")
    assert comes_about(lambda: followed.read() == ["a:1"])
    tritons.write("b:1")  # a whole exchange lies between the two
    assert comes_about(lambda: followed.read() == ["a:1", "b:1"])
    gateways.read()
    assert [value for value, _ in gateways.read_before.values()] == published


def test_gateway_stops_while_the_head_is_away(store: FakeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: it ended with an error of Ray."""
    monkeypatch.setattr(gateway, "supervised_gateway", lambda *arguments, say: nullcontext())
    with ray_gateway(Registry("models", store), HOST, 9000, say=print):
        store.is_away = True


def test_gateway_keeps_its_addresses_while_the_head_is_away(store: FakeStore, followed: AddressFile) -> None:
    tritons = Registry("models", store).tritons
    tritons.write("a:1")
    assert comes_about(lambda: followed.read() == ["a:1"])
    store.is_away = True
    store.values.clear()
    assert not comes_about(lambda: followed.read() != ["a:1"], 0.2)
    store.is_away = False
    tritons.write("b:1")
    assert comes_about(lambda: followed.read() == ["b:1"])


@pytest.fixture
def stopped() -> threading.Event:
    """Return the event of a Triton that was told to stop."""
    return threading.Event()


@pytest.fixture
def running(store: FakeStore, stopped: threading.Event, monkeypatch: pytest.MonkeyPatch) -> TritonReplica:
    """Return a replica whose Triton is a stand-in."""

    @contextmanager
    def run(repository: Path, host: str, **options: Any) -> Iterator[TritonServer]:
        process = SimpleNamespace(poll=lambda: 0 if stopped.is_set() else None, pid=1)
        yield TritonServer(host, Ports(), cast("subprocess.Popen[str]", process), [], True, repository)
        stopped.set()

    monkeypatch.setattr(replica, "running", run)
    monkeypatch.setattr(registry, "MAX_UNCHANGED_READS", 10**9)  # the tests write once what gateways write regularly
    monkeypatch.setattr(replica, "get_node_ip_address", lambda: HOST)
    monkeypatch.setattr(replica.TritonReplica, "_watch", lambda self: None)
    return TritonReplica(RayOptions(repository="models"), Registry("models", store))


def test_replica_publishes_its_address_and_its_load(store: FakeStore, running: TritonReplica) -> None:
    gateways = Registry("models", store)
    assert set(gateways.tritons.read()) == {TRITON}
    gateways.gateways.write("a", {TRITON: 3, "b:1": 9})
    gateways.gateways.write("b", {TRITON: 4})
    assert comes_about(lambda: running.record_autoscaling_stats() == {"requests": 7})
    store.values.clear()
    running.__del__()


def test_replica_stops_triton_once_no_gateway_uses_it(
    store: FakeStore, running: TritonReplica, stopped: threading.Event
) -> None:
    gateways = Registry("models", store).gateways
    writing = registry.Repeating(lambda: gateways.write("a", requests))
    requests = {TRITON: 1}
    gateways.write("a", requests)
    writing.start()
    ending = threading.Thread(target=running.__del__)
    ending.start()
    assert comes_about(lambda: not Registry("models", store).tritons.read())
    assert not stopped.wait(0.2)
    requests.clear()
    assert stopped.wait(60)
    ending.join(60)
    writing.stop()


def test_replica_stops_triton_if_the_head_is_away(
    store: FakeStore, running: TritonReplica, stopped: threading.Event
) -> None:
    store.is_away = True
    running.__del__()
    assert stopped.is_set()


@pytest.mark.parametrize(("metrics", "wanted"), [({}, 0), ({"requests": {"a": 10.0, "b": 14.0}}, 3)])
def test_replicas_follow_the_requests_of_all_gateways(metrics: dict[str, dict[str, float]], wanted: float) -> None:
    config = SimpleNamespace(get_target_ongoing_requests=lambda: 8)
    assert replicas_for_requests(SimpleNamespace(aggregated_metrics=metrics, config=config)) == (wanted, {})


class Answering(BaseHTTPRequestHandler):
    """Answers each request with 200."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *arguments: object) -> None:
        """Write no access log."""


def test_gateway_replica_is_healthy_while_its_gateway_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway, "ANSWER_TIMEOUT_S", 0.1)
    with HTTPServer((HOST, 0), Answering) as server:
        port, ended = server.server_address[1], threading.Event()

        @contextmanager
        def run(registry: Registry, *arguments: object, say: Callable[[str], None]) -> Iterator[None]:
            assert arguments == (HOST, port, "--keys", "keys")
            yield
            ended.set()

        monkeypatch.setattr(gateway, "ray_gateway", run)
        monkeypatch.setattr("ray.serve.get_replica_context", lambda: SimpleNamespace(app_name="models"))
        placed = GatewayReplica(RayOptions(repository="models", port=port, keys_file="keys"), tritons=None)
        with pytest.raises(TimeoutError):  # it listens, and hangs
            placed.check_health()
        threading.Thread(target=server.serve_forever, args=(0.01,)).start()
        monkeypatch.setattr(gateway, "ANSWER_TIMEOUT_S", 60)
        placed.check_health()
        server.shutdown()
    with pytest.raises(ConnectionRefusedError):
        placed.check_health()
    placed.__del__()
    assert ended.is_set()
