"""Members of a fleet: names that are not resolved, servers that hang, and models whose only server is away."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from builder.serving.gateway.fleet import fleet_server
from builder.serving.gateway.fleet import members as members_module
from builder.serving.gateway.fleet.members import FleetMembers
from builder.serving.gateway.fleet.metrics import FleetMetrics
from builder.serving.gateway.fleet.targets import AddressFile, DnsName, Target
from tests.serving.gateway.asgi import ask
from tests.serving.gateway.fleet.servers import FleetTriton, fleet
from tests.serving.gateway.fleet.test_fleet import embed

NAME = DnsName("tritons", 8001)


def _members(*targets: Target) -> FleetMembers:
    return FleetMembers(targets, FleetMetrics(CollectorRegistry()))


async def test_name_that_is_not_resolved_leaves_the_other_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: one unknown name hid every other address at the start, and froze them later."""
    found: dict[Target, Sequence[str] | OSError] = {NAME: socket.gaierror("unknown"), "a:1": ["a:1"], "b:1": ["b:1"]}

    async def resolve(target: Target) -> Sequence[str]:
        answer = found[target]
        if isinstance(answer, OSError):
            raise answer
        return answer

    monkeypatch.setattr(members_module, "resolve", resolve)
    members = _members("a:1", NAME, "b:1")
    await members.resolve()
    assert list(members.servers) == ["a:1", "b:1"]
    found[NAME] = ["10.0.0.1:8001", "a:1"]
    await members.resolve()
    assert set(members.servers) == {"a:1", "b:1", "10.0.0.1:8001"}
    found[NAME] = socket.gaierror("unknown")
    await members.resolve()
    assert not any(server.is_leaving for server in members.servers.values())
    found[NAME] = ["10.0.0.2:8001"]
    await members.resolve()
    assert [server.name for server in members.servers.values() if server.is_leaving] == ["10.0.0.1:8001"]
    await members.close()


async def test_file_of_addresses_is_followed_and_gets_the_requests(tmp_path: Path) -> None:
    file = AddressFile(tmp_path / "tritons")
    members = _members(file)
    file.write(["127.0.0.1:1", "127.0.0.1:2"])
    assert file.take_requests() is None
    await members.update()
    members.servers["127.0.0.1:1"].requests = 1
    for unreadable in ("b", None):  # a mistake, and no file
        file.path.write_text(unreadable) if unreadable else file.path.unlink()
        await members.update()
    assert file.take_requests() == {"127.0.0.1:1": 1, "127.0.0.1:2": 0}
    assert file.take_requests() is None, "they are from before"
    file.write([])
    await members.update()
    assert file.take_requests() == {"127.0.0.1:1": 1}, "it drains"
    members.servers["127.0.0.1:1"].requests = 0
    await members.update()
    assert file.take_requests() == {}
    await members.close()


async def test_slow_resolver_does_not_delay_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: a server that died during an outage of the DNS stayed ready until the resolver gave up."""
    async with fleet(FleetTriton()) as running:

        async def resolve(target: Target) -> Sequence[str]:
            await asyncio.sleep(60)
            return []

        monkeypatch.setattr(members_module, "CHECK_INTERVAL_S", 0.01)
        monkeypatch.setattr(members_module, "RESOLUTION_INTERVAL_S", 0.01)
        monkeypatch.setattr(members_module, "resolve", resolve)
        watching = asyncio.ensure_future(running.members.watch())
        await asyncio.sleep(0.2)
        running.tritons[0].is_ready = False
        async with asyncio.timeout(5):
            while running.members.accepting():
                await asyncio.sleep(0.01)
        watching.cancel()


async def test_watch_survives_a_defect(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Regression: an unexpected error ended the checks without a word, and the fleet was frozen as it was."""
    checks = 0

    async def check() -> None:
        nonlocal checks
        checks += 1
        raise KeyError("a defect")

    async with fleet(FleetTriton()) as running:
        monkeypatch.setattr(members_module, "CHECK_INTERVAL_S", 0.01)
        monkeypatch.setattr(running.members, "check", check)
        watching = asyncio.ensure_future(running.members.watch())
        with caplog.at_level(logging.CRITICAL):
            async with asyncio.timeout(5):
                while checks < 3:
                    await asyncio.sleep(0.01)
            watching.cancel()


async def test_server_that_hangs_does_not_delay_the_catalogue(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: one server that accepted a call and did not answer it held the list of models for 30 s."""
    monkeypatch.setattr(fleet_server, "CHECK_TIMEOUT_S", 0.3)
    async with fleet(FleetTriton(), FleetTriton()) as running:
        running.tritons[0].responds.clear()
        async with asyncio.timeout(10):
            models = (await ask(running.app, "/v1/models")).json["data"]
        assert {"embeds", "ranks", "writes"} <= {model["id"] for model in models}


async def test_server_whose_index_hangs_does_not_become_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: it was ready from each answer to the readiness check until the timeout of its index."""
    monkeypatch.setattr(fleet_server, "CHECK_TIMEOUT_S", 0.2)
    async with fleet(FleetTriton()) as running:
        (server,) = running.members.servers.values()
        running.tritons[0].responds.clear()
        for _ in range(fleet_server.MISSED_CHECKS):
            await running.members.check()
        assert not server.is_ready
        checking = asyncio.ensure_future(running.members.check())
        while not checking.done():
            assert not server.is_ready
            await asyncio.sleep(0.01)
        running.tritons[0].responds.set()
        await running.members.check()
        assert server.is_ready


async def test_model_whose_only_server_is_away_is_unavailable() -> None:
    """Regression: 404 said that the model does not exist, which clients take for final."""
    async with fleet(FleetTriton({"embeds": ("1",)}), FleetTriton({"ranks": ("1",)})) as running:
        assert (await embed(running)).status == 200
        running.tritons[0].is_ready = False
        await running.members.check()
        running.models.read_at = -1e9
        assert [model.name for model in await running.models.all()] == ["ranks"]
        assert (await embed(running)).status == 503
        assert (await ask(running.app, "/v1/embeddings", {"model": "none", "input": "a"})).status == 404


async def test_drained_server_is_closed_without_delaying_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: calls of a server that left, whose clients had disconnected, held all checks for up to 10 s."""
    async with fleet(FleetTriton(), FleetTriton()) as running:
        server = running.members.servers[running.addresses[0]]
        closed, may_close = asyncio.Event(), asyncio.Event()

        async def close(grace_s: float = 0.0) -> None:
            await may_close.wait()
            closed.set()

        monkeypatch.setattr(server.triton, "close", close)

        async def resolve(target: Target) -> Sequence[str]:
            return [] if target == running.addresses[0] else [str(target)]

        monkeypatch.setattr(members_module, "resolve", resolve)
        async with asyncio.timeout(5):
            await running.members.update()
        assert list(running.members.servers) == [running.addresses[1]]
        may_close.set()
        async with asyncio.timeout(5):
            await closed.wait()


async def test_connection_ends_when_its_machine_is_gone() -> None:
    """Regression: a request on a machine that vanished was neither answered nor sent to another server."""
    async with fleet(FleetTriton()) as running:
        assert (await embed(running)).status == 200
        port = int(running.addresses[0].rpartition(":")[2])
        assert _user_timeouts_ms(port) == [20_000]


def _user_timeouts_ms(port: int) -> list[int]:
    """Return TCP_USER_TIMEOUT of this process's sockets that are connected to `port`."""
    found = []
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(descriptor))) as sock:
            if sock.family in (socket.AF_INET, socket.AF_INET6) and sock.getpeername()[1] == port:
                found.append(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT))
    return found


async def test_hanging_server_does_not_delay_the_checks_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: the next checks of all servers waited until the one that hangs had missed its own."""
    monkeypatch.setattr(members_module, "CHECK_INTERVAL_S", 0.05)
    async with fleet(FleetTriton(), FleetTriton()) as running:
        hanging, other = running.tritons
        hanging.responds.clear()
        watching = asyncio.ensure_future(running.members.watch())
        await asyncio.sleep(0.2)
        begun = time.monotonic()
        other.is_ready = False
        while running.members.servers[running.addresses[1]].is_ready:
            await asyncio.sleep(0.01)
        assert time.monotonic() - begun < fleet_server.CHECK_TIMEOUT_S / 2
        assert running.members.servers[running.addresses[0]].missed_checks == 0, "its first check still runs"
        watching.cancel()
