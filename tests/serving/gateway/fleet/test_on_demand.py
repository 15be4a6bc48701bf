"""Models on demand over several stand-ins for Triton: placement, copies, failures, and several gateways."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest

from builder.serving.gateway.errors import queue_full, unavailable
from builder.serving.gateway.fleet import on_demand
from builder.serving.gateway.fleet.fleet_server import MISSED_CHECKS, FleetServer
from builder.serving.gateway.fleet.on_demand_server import OnDemandServer
from builder.serving.gateway.fleet.placement import COPY_IDLE_S, ranked
from builder.serving.gateway.fleet.request_work import BYTES_PER_TOKEN
from builder.serving.gateway.fleet.routing import BATCHED_TOKENS
from builder.serving.gateway.residency.loader import TritonLoader
from builder.serving.gateway.residency.memory import TritonProcesses
from builder.serving.gateway.residency.memory_budget import SERVER_BYTES
from builder.serving.gateway.residency.repository_models import RepositoryModels
from tests.serving.gateway.asgi import ask
from tests.serving.gateway.fake_control import make_models
from tests.serving.gateway.fleet.on_demand import FleetFakeServer, OnDemandFleet
from tests.serving.gateway.on_demand import NOWHERE, ONE, until

ADDRESSES = [f"10.0.0.{number}:8001" for number in range(3)]
NAMES = [f"embeds-{letter}" for letter in "abcdefgh"]


async def test_models_are_spread_over_the_memory_of_all_servers(tmp_path: Path) -> None:
    make_models(tmp_path, *NAMES[:6])
    fleet = OnDemandFleet(tmp_path, ADDRESSES)
    async with fleet.started():
        assert len((await ask(fleet.app, "/v1/models")).json["data"]) == 6
        for name in NAMES[:6] * 2:
            assert (await fleet.embed(name)).status == 200
            await fleet.members.check()
        assert [len(triton.loads) for triton in fleet.tritons.values()] == [2, 2, 2], "each model is loaded once"
        assert not any(triton.unloads for triton in fleet.tritons.values())
        assert (await fleet.embed("embeds-z")).status == 404
        text = (await ask(fleet.app, "/metrics")).pieces[0].decode()
        assert "build_repo_gateway_resident_models 6.0" in text


async def test_more_models_than_memory_evict_the_longest_idle(tmp_path: Path) -> None:
    make_models(tmp_path, *NAMES)
    fleet = OnDemandFleet(tmp_path, ADDRESSES)
    async with fleet.started():
        for name in NAMES[:6]:
            await fleet.embed(name)
        for name in (*NAMES[2:6], "embeds-g", "embeds-h"):
            assert (await fleet.embed(name)).status == 200
        await until(lambda: sum(len(triton.unloads) for triton in fleet.tritons.values()) == 2)
        assert sorted(name for triton in fleet.tritons.values() for name in triton.unloads) == NAMES[:2]


async def test_requests_for_one_cold_model_load_it_once(tmp_path: Path) -> None:
    make_models(tmp_path, *NAMES[:2])
    fleet = OnDemandFleet(tmp_path, ADDRESSES)
    async with fleet.started():
        answers = await asyncio.gather(*(fleet.embed(name) for name in NAMES[:2] * 20))
        assert {answer.status for answer in answers} == {200}
        assert sorted(name for triton in fleet.tritons.values() for name in triton.loads) == NAMES[:2]


async def test_models_of_a_dead_server_are_loaded_elsewhere(tmp_path: Path) -> None:
    make_models(tmp_path, *NAMES[:3])
    fleet = OnDemandFleet(tmp_path, ADDRESSES)
    async with fleet.started():
        for name in NAMES[:3]:
            await fleet.embed(name)
        await fleet.members.check()
        (dead,) = fleet.servers_with("embeds-a")
        fleet.tritons[dead].is_up = False
        for name in NAMES[:3] * 4:
            assert (await fleet.embed(name)).status == 200
        assert set(fleet.servers_with("embeds-a")) > {dead}


async def test_model_that_loads_nowhere_is_tried_on_three_servers(tmp_path: Path) -> None:
    make_models(tmp_path, "embeds-a", "embeds-b")
    fleet = OnDemandFleet(tmp_path, [f"10.0.1.{number}:8001" for number in range(6)])
    async with fleet.started():
        for triton in fleet.tritons.values():
            triton.broken["embeds-a"] = "no such engine"
        for _ in range(5):
            refused = await fleet.embed("embeds-a")
            assert (refused.status, refused.error["code"]) == (503, "model_failed")
        assert sum(bool(triton.tried) for triton in fleet.tritons.values()) == 3
        assert (await fleet.embed("embeds-b")).status == 200


async def test_model_that_fails_on_one_server_loads_on_another(tmp_path: Path) -> None:
    make_models(tmp_path, "embeds-a")
    fleet = OnDemandFleet(tmp_path, ADDRESSES)
    async with fleet.started():
        first = ranked("embeds-a", list(fleet.members.servers.values()))[0]
        fleet.tritons[first.name].broken["embeds-a"] = "disk full"
        for _ in range(5):
            assert (await fleet.embed("embeds-a")).status == 200
        assert fleet.tritons[first.name].tried == ["embeds-a"]


async def test_full_server_gets_help_from_a_copy_that_goes_when_idle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on_demand, "IDLE_COPIES_INTERVAL_S", 0.01)
    make_models(tmp_path, "embeds-a")
    fleet = OnDemandFleet(tmp_path, ADDRESSES)
    async with fleet.started():
        await fleet.embed("embeds-a")
        (full,) = fleet.servers_with("embeds-a")
        await fleet.members.check()
        fleet.members.servers[full].work += 10 * BATCHED_TOKENS
        assert (await fleet.embed("embeds-a")).status == 200, "it does not wait for the copy"
        await until(lambda: fleet.loaded("embeds-a") == 2)
        await fleet.members.check()
        await fleet.embed("embeds-a")
        (copy,) = set(fleet.servers_with("embeds-a")) - {full}
        assert len(fleet.tritons[copy].answered) == 1
        fleet.members.servers[full].work = 0
        watching = asyncio.ensure_future(fleet.backend.watch())
        for _ in range(int(COPY_IDLE_S) + 1):
            await fleet.embed("embeds-a")
        await until(lambda: len(fleet.servers_with("embeds-a")) == 1)
        watching.cancel()
        assert (await fleet.embed("embeds-a")).status == 200


async def test_two_full_or_failing_servers_get_help_from_a_third(tmp_path: Path) -> None:
    """A popular model is loaded on a third server while one of its two is full and the other one is slow, or away."""
    make_models(tmp_path, "embeds-a")
    fleet = OnDemandFleet(tmp_path, [f"10.0.1.{number}:8001" for number in range(6)])
    async with fleet.started():
        await fleet.embed("embeds-a")
        for copies in (1, 2, 3):
            holders = fleet.servers_with("embeds-a")
            assert len(holders) == copies
            await fleet.members.check()
            for address in holders:
                server = fleet.members.servers[address]
                server.work = 10 * BATCHED_TOKENS
                server.slowness_meter.mean = float(copies)
            assert (await fleet.embed("embeds-a")).status == 200, "it does not wait for the copy"
            await until(lambda holders=holders: len(fleet.servers_with("embeds-a")) > len(holders))  # type: ignore[misc]
            await until(lambda: not fleet.backend.copying)
        for address in fleet.servers_with("embeds-a")[:2]:
            fleet.tritons[address].is_up = False
        assert (await fleet.embed("embeds-a")).status == 200


async def test_cold_model_gets_a_copy_for_each_batch_that_waits(tmp_path: Path) -> None:
    """Regression: one copy was loaded at a time, and all requests that waited were sent to the first server."""
    make_models(tmp_path, "embeds-a")
    fleet = OnDemandFleet(tmp_path, [f"10.0.1.{number}:8001" for number in range(6)])
    async with fleet.started():
        may_load = asyncio.Event()
        for triton in fleet.tritons.values():
            triton.may_load = may_load
        batch = "x" * BYTES_PER_TOKEN * BATCHED_TOKENS
        asking = asyncio.gather(*(fleet.embed("embeds-a", batch) for _ in range(12)))
        await until(lambda: sum(server.requests for server in fleet.members.servers.values()) == 12)
        may_load.set()
        assert {answer.status for answer in await asking} == {200}
        counts = [len(triton.answered) for triton in fleet.tritons.values() if triton.answered]
        assert len(counts) >= 3
        assert max(counts) <= 6


async def test_requests_that_wait_move_to_the_server_that_loads_first(tmp_path: Path) -> None:
    """Regression: they waited for the server that was chosen first, however long its load took."""
    make_models(tmp_path, "embeds-a")
    fleet = OnDemandFleet(tmp_path, [f"10.0.1.{number}:8001" for number in range(6)])
    async with fleet.started():
        first = ranked("embeds-a", list(fleet.members.servers.values()))[0]
        hangs, may_load = asyncio.Event(), asyncio.Event()
        for triton in fleet.tritons.values():
            triton.may_load = may_load
        fleet.tritons[first.name].may_load = hangs
        batch = "x" * BYTES_PER_TOKEN * BATCHED_TOKENS
        asking = asyncio.gather(*(fleet.embed("embeds-a", batch) for _ in range(12)))
        await until(lambda: sum(server.requests for server in fleet.members.servers.values()) == 12)
        assert first.requests
        may_load.set()
        assert {answer.status for answer in await asking} == {200}
        assert fleet.backend.budget.left == 100.0, "it is no retry"
        hangs.set()
        await until(lambda: fleet.loaded("embeds-a") > 2)


async def test_request_does_not_move_back_to_a_server_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: while it waited for a load, it left its place in the queue and took a new one ten times a second."""
    make_models(tmp_path, "embeds-a")
    monkeypatch.setattr(on_demand, "WAIT_CHECK_INTERVAL_S", 0.001)
    fleet = OnDemandFleet(tmp_path, ADDRESSES[:2])

    async def fail(*_: object) -> None:
        raise unavailable("Socket closed")

    async with fleet.started():
        await fleet.embed("embeds-a")
        await fleet.members.check()
        (address,) = fleet.servers_with("embeds-a")
        (other,) = set(ADDRESSES[:2]) - {address}
        monkeypatch.setattr(fleet.tritons[address], "infer", fail)
        fleet.tritons[other].may_load = may_load = asyncio.Event()
        chosen, choose = [], fleet.backend._choose

        def note(*arguments: Any) -> FleetServer:
            chosen.append(choose(*arguments))
            return chosen[-1]

        monkeypatch.setattr(fleet.backend, "_choose", note)
        asking = asyncio.ensure_future(fleet.embed("embeds-a"))
        await until(lambda: bool(fleet.tritons[other].tried))
        await asyncio.sleep(0.02)
        may_load.set()
        assert (await asking).status == 200
        assert [server.name for server in chosen] == [address, other]


async def test_copy_that_does_not_load_is_logged_and_delays_the_next(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Regression: its error was dropped, and every request tried again at once."""
    make_models(tmp_path, "embeds-a")
    fleet = OnDemandFleet(tmp_path, ADDRESSES)
    async with fleet.started():
        await fleet.embed("embeds-a")
        (full,) = fleet.servers_with("embeds-a")
        await fleet.members.check()
        fleet.members.servers[full].work += 10 * BATCHED_TOKENS
        for address in set(ADDRESSES) - {full}:
            fleet.tritons[address].broken["embeds-a"] = "disk full"
        assert (await fleet.embed("embeds-a")).status == 200
        await until(lambda: "disk full" in caplog.text)
        assert "embeds-a" in fleet.backend.copying


async def test_full_queue_makes_no_other_server_load_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: two more servers loaded it, and evicted models in use for that."""
    make_models(tmp_path, "embeds-a")
    fleet = OnDemandFleet(tmp_path, ADDRESSES)

    async def refuse(*_: object) -> None:
        raise queue_full("2 requests wait already")

    async with fleet.started():
        await fleet.embed("embeds-a")
        await fleet.members.check()
        (address,) = fleet.servers_with("embeds-a")
        monkeypatch.setattr(fleet.tritons[address], "infer", refuse)
        refused = await fleet.embed("embeds-a")
        assert (refused.status, refused.error["code"]) == (429, "queue_full")
        assert fleet.servers_with("embeds-a") == [address]


async def test_model_whose_memory_is_unknown_is_not_tried_at_every_request(tmp_path: Path) -> None:
    """Regression: the estimate of its memory failed each time, without a delay and uncounted."""
    make_models(tmp_path, "embeds-a", engine=True)
    (tmp_path / "embeds-a_model" / "config.pbtxt").unlink()
    fleet = OnDemandFleet(tmp_path, ADDRESSES)
    async with fleet.started():
        for server in fleet.members.servers.values():
            assert isinstance(server, OnDemandServer)
            server.residents.backoff.now = lambda: 0.0
        for _ in range(3):
            refused = await fleet.embed("embeds-a")
            assert (refused.status, refused.error["code"]) == (503, "model_failed")
        text = (await ask(fleet.app, "/metrics")).pieces[0].decode()
        assert "build_repo_gateway_model_load_failures_total 3.0" in text


async def test_gateways_share_servers_without_talking_to_each_other(tmp_path: Path) -> None:
    make_models(tmp_path, *NAMES[:6])
    one = OnDemandFleet(tmp_path, ADDRESSES)
    other = OnDemandFleet(tmp_path, ADDRESSES, tritons=one.tritons)
    async with one.started(), other.started():
        for number, name in enumerate(NAMES[:6] * 2):
            for gateway in (one, other) if number % 2 else (other, one):
                assert (await gateway.embed(name)).status == 200
                await one.members.check()
                await other.members.check()
        assert all(len(one.servers_with(name)) == 1 for name in NAMES[:6])


async def test_failed_copy_sends_its_requests_to_the_first_server(tmp_path: Path) -> None:
    """Regression: they failed once the retries were used up, although the first server was about to answer."""
    make_models(tmp_path, "embeds-a")
    fleet = OnDemandFleet(tmp_path, [f"10.0.1.{number}:8001" for number in range(6)])
    async with fleet.started():
        first, *others = ranked("embeds-a", list(fleet.members.servers.values()))
        may_load, may_fail = asyncio.Event(), asyncio.Event()
        fleet.tritons[first.name].may_load = may_load
        fleet.backend.budget.left = -100.0
        for other in others:
            fleet.tritons[other.name].may_load = may_fail
            fleet.tritons[other.name].broken["embeds-a"] = "disk full"
        batch = {"model": "embeds-a", "input": "x" * BYTES_PER_TOKEN * BATCHED_TOKENS}
        asking = asyncio.gather(*(ask(fleet.app, "/v1/embeddings", batch) for _ in range(12)))
        await until(lambda: sum(server.requests for server in fleet.members.servers.values()) == 12)
        assert first.requests < 12
        may_fail.set()
        await until(lambda: first.requests == 12)
        may_load.set()
        assert {answer.status for answer in await asking} == {200}


async def test_copy_that_failed_is_loaded_on_another_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: the server on which it had failed was chosen again, each time."""
    monkeypatch.setattr(on_demand, "COPY_PAUSE_S", 0.0)
    make_models(tmp_path, "embeds-a")
    fleet = OnDemandFleet(tmp_path, ADDRESSES)
    async with fleet.started():
        full, failing, other = ranked("embeds-a", list(fleet.members.servers.values()))
        assert (await fleet.embed("embeds-a")).status == 200
        await fleet.members.check()
        full.work += 10 * BATCHED_TOKENS
        fleet.tritons[failing.name].broken["embeds-a"] = "disk full"
        for target in (failing, other):
            assert (await ask(fleet.app, "/v1/embeddings", {"model": "embeds-a", "input": "text"})).status == 200
            await until(lambda: not fleet.backend.copying)
            assert fleet.tritons[target.name].tried == ["embeds-a"]
        assert fleet.servers_with("embeds-a") == sorted([full.name, other.name])


async def test_place_for_a_copy_is_looked_for_once_a_pause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: every request looked at all servers again, which takes milliseconds in a large fleet."""
    make_models(tmp_path, "embeds-a")
    fleet = OnDemandFleet(tmp_path, ADDRESSES)
    searches = []
    monkeypatch.setattr(on_demand, "COPY_PAUSE_S", 3600.0)
    monkeypatch.setattr(on_demand, "place_copy", lambda *_: searches.append(1))
    async with fleet.started():
        await fleet.embed("embeds-a")
        (full,) = fleet.servers_with("embeds-a")
        fleet.members.servers[full].work += 100 * BATCHED_TOKENS
        for _ in range(20):
            assert (await fleet.embed("embeds-a")).status == 200
        assert len(searches) == 1


async def test_copies_of_two_models_do_not_book_the_same_memory(tmp_path: Path) -> None:
    """Regression: both were sent to the same server, if the first one had not begun to load there."""
    make_models(tmp_path, *NAMES)
    fleet = OnDemandFleet(tmp_path, ADDRESSES, room=1)
    async with fleet.started():
        first, second, free = fleet.members.servers.values()
        for name, server in zip(NAMES, (first, second), strict=False):
            assert isinstance(server, OnDemandServer)
            server.residents.release(await server.residents.lease(name))
            server.work += 10 * BATCHED_TOKENS
        for name, server in zip(NAMES, (first, second), strict=False):
            fleet.backend._copy_if_full(name, [server])
        assert fleet.backend.copying == {NAMES[0]: [free], NAMES[1]: [None]}


def _copies(folder: Path, *versions: int) -> list[Path]:
    """Return a repository for each version, which has that version of embeds-a alone, as a pod that pulls it."""
    copies: list[Path] = []
    for number in versions:
        copies.append(folder / f"copy{len(copies)}")
        make_models(copies[-1], "embeds-a", versions=number)
        for earlier in range(1, number):
            shutil.rmtree(copies[-1] / "embeds-a" / str(earlier))
    return copies


async def test_either_version_answers_while_pods_with_a_new_one_replace_the_old(tmp_path: Path) -> None:
    """Regression: pods that had pulled another version than the gateway refused to load the model."""
    copies = _copies(tmp_path, 2, 3)
    tritons = {address: FleetFakeServer(copy) for address, copy in zip(ADDRESSES, (copies[1], *copies), strict=False)}
    for copy in copies:
        fleet = OnDemandFleet(copy, ADDRESSES, tritons=tritons)
        async with fleet.started():
            assert (await fleet.embed("embeds-a")).status == 200
            holders = fleet.servers_with("embeds-a")
            for address in holders:
                tritons[address].is_up = False
            assert (await fleet.embed("embeds-a")).status == 200
            for address in holders:
                tritons[address].is_up = True
    assert {version for triton in tritons.values() for _, version in triton.answered} == {"2", "3"}
    assert max(len(triton.loads) for triton in tritons.values()) == 1


async def test_version_of_a_copy_with_another_interface_is_refused(tmp_path: Path) -> None:
    ours, theirs = _copies(tmp_path, 2, 3)
    config = theirs / "embeds-a" / "config.pbtxt"
    config.write_text(config.read_text().replace("TYPE_FP32", "TYPE_FP16"))
    fleet = OnDemandFleet(ours, ADDRESSES, tritons={address: FleetFakeServer(theirs) for address in ADDRESSES})
    async with fleet.started():
        refused = await fleet.embed("embeds-a")
        assert (refused.status, refused.error["code"]) == (503, "model_failed")
        assert "where version 2 is served" in refused.error["message"]


@pytest.mark.parametrize("verify_key", [None, Path("key.pem")])
def test_gateway_with_a_key_takes_no_version_that_it_cannot_verify(
    tmp_path: Path, verify_key: Path | None, caplog: pytest.LogCaptureFixture
) -> None:
    """Regression: it answered with a version of a Triton's copy, whose signature it had not seen."""
    ours, theirs = _copies(tmp_path, 2, 3)
    triton: Any = FleetFakeServer(theirs)
    loader = TritonLoader(triton, RepositoryModels(ours), NOWHERE, TritonProcesses(NOWHERE), verify_key, has_copy=True)
    assert asyncio.run(loader.stands_in("embeds-a", "3")) == (verify_key is None)
    assert ("version 3" in caplog.text) == (verify_key is None), "what answers is logged"


async def test_model_loaded_in_another_version_counts_as_memory(tmp_path: Path) -> None:
    """Regression: a gateway of an earlier rollout counted nothing for what later gateways had loaded."""
    ours, theirs = _copies(tmp_path, 2, 3)
    fleet = OnDemandFleet(ours, ADDRESSES[:1], tritons={ADDRESSES[0]: FleetFakeServer(theirs)})
    async with fleet.started():
        (server,) = fleet.members.servers.values()
        assert isinstance(server, OnDemandServer)
        fleet.tritons[server.name].loaded["embeds-a"] = "3"
        await until(lambda: "embeds-a" in server.residents.models)
        assert server.residents.budget.used() == SERVER_BYTES + ONE
        assert (await fleet.embed("embeds-a")).status == 200
        assert not fleet.tritons[server.name].tried


async def test_new_triton_loads_pinned_models_before_it_takes_requests_for_them(tmp_path: Path) -> None:
    make_models(tmp_path, "embeds-a")
    tritons = {address: FleetFakeServer(tmp_path) for address in ADDRESSES[:2]}
    fleet = OnDemandFleet(tmp_path, ADDRESSES[:1], tritons=tritons, pins=("embeds-a",))
    old, new = tritons.values()
    new.may_load = may_load = asyncio.Event()
    async with fleet.started():
        await until(lambda: bool(old.loads))
        fleet.members.targets = ADDRESSES[:2]
        await fleet.members.update()
        await until(lambda: new.tried == ["embeds-a"])
        for _ in range(20):
            assert (await fleet.embed("embeds-a")).status == 200
        assert not new.answered
        may_load.set()
        await until(lambda: fleet.loaded("embeds-a") == 2)
        old.is_up = False
        assert (await fleet.embed("embeds-a")).status == 200
        assert new.answered


async def test_triton_that_leaves_answers_until_others_have_loaded_its_models(tmp_path: Path) -> None:
    """Regression: requests waited for the loads of all its models, which it could have answered meanwhile."""
    make_models(tmp_path, "embeds-a", "embeds-b")
    fleet = OnDemandFleet(tmp_path, ADDRESSES[:1], tritons={name: FleetFakeServer(tmp_path) for name in ADDRESSES[:2]})
    old, new = fleet.tritons.values()
    new.may_load = may_load = asyncio.Event()
    async with fleet.started():
        for name in ("embeds-a", "embeds-b"):
            await fleet.embed(name)
        await _leave(fleet)
        for _ in range(10):
            assert (await fleet.embed("embeds-a")).status == 200
        await until(lambda: new.tried == ["embeds-a"])
        assert (len(old.answered), new.answered) == (12, [])
        may_load.set()
        await until(lambda: fleet.loaded("embeds-a") == 2)
        assert (await fleet.embed("embeds-a")).status == 200
        assert len(new.answered) == 1
        fleet.now += COPY_IDLE_S
        await fleet.members.check()
        assert list(fleet.members.servers) == ADDRESSES[1:2]
        assert (await fleet.embed("embeds-b")).status == 200


async def test_triton_that_leaves_answers_while_loads_of_its_models_fail(tmp_path: Path) -> None:
    """Regression: each request began another load of the model elsewhere, and logged that it failed."""
    make_models(tmp_path, "embeds-a")
    fleet = OnDemandFleet(tmp_path, ADDRESSES[:1], tritons={name: FleetFakeServer(tmp_path) for name in ADDRESSES[:2]})
    new = fleet.tritons[ADDRESSES[1]]
    new.broken["embeds-a"] = "no such file"
    async with fleet.started():
        await fleet.embed("embeds-a")
        await _leave(fleet)
        assert (await fleet.embed("embeds-a")).status == 200
        await until(lambda: bool(new.tried))
        for _ in range(20):
            assert (await fleet.embed("embeds-a")).status == 200
            assert len(fleet.backend.copying.get("embeds-a", ())) <= 1


async def test_triton_that_leaves_loads_no_model_that_another_gateway_unloaded(tmp_path: Path) -> None:
    """Regression: models are not listed while it leaves, so that it seemed to have this one."""
    make_models(tmp_path, "embeds-a")
    fleet = OnDemandFleet(tmp_path, ADDRESSES[:1], tritons={name: FleetFakeServer(tmp_path) for name in ADDRESSES[:2]})
    old, new = fleet.tritons.values()
    async with fleet.started():
        await fleet.embed("embeds-a")
        leaving = await _leave(fleet)
        await old.unload("embeds-a")
        leaving.residents.remove_unloaded("embeds-a", before=fleet.now + 1)
        assert (await fleet.embed("embeds-a")).status == 200
        assert (old.loads, new.loads) == (["embeds-a"], ["embeds-a"])


async def _leave(fleet: OnDemandFleet) -> OnDemandServer:
    """Replace the first address by the second one. Return the server that leaves."""
    await fleet.members.check()
    fleet.members.targets, fleet.members.addresses = ADDRESSES[1:2], {}
    await fleet.members.update()
    leaving = fleet.members.servers[ADDRESSES[0]]
    assert isinstance(leaving, OnDemandServer)
    return leaving


async def test_triton_that_has_stopped_is_forgotten_at_once(tmp_path: Path) -> None:
    make_models(tmp_path, "embeds-a")
    fleet = OnDemandFleet(tmp_path, ADDRESSES[:1], tritons={name: FleetFakeServer(tmp_path) for name in ADDRESSES[:2]})
    async with fleet.started():
        await fleet.embed("embeds-a")
        fleet.tritons[ADDRESSES[0]].is_up = False
        fleet.members.targets, fleet.members.addresses = ADDRESSES[1:2], {}
        await fleet.members.resolve()
        for _ in range(MISSED_CHECKS + 1):
            await fleet.members.check()
        assert list(fleet.members.servers) == ADDRESSES[1:2]
        assert (await fleet.embed("embeds-a")).status == 200
