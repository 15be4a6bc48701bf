"""Loading on demand over a stand-in for Triton: loads, unloads, waiting requests and refusals."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import uvloop
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from prometheus_client import CollectorRegistry

from builder.common.errors import SpecError
from builder.repository.signatures import Signer, sign
from builder.serving.gateway.errors import ApiError
from builder.serving.gateway.journal import Journal
from builder.serving.gateway.residency import offered, room
from builder.serving.gateway.residency.app import make_on_demand
from builder.serving.gateway.residency.backend import OnDemand
from builder.serving.gateway.residency.backoff import ANSWERED_S
from builder.serving.gateway.residency.lifecycle import Lifecycle
from builder.serving.gateway.residency.measures import Measures
from builder.serving.gateway.residency.needs import Needs
from builder.serving.gateway.residency.offered import Offered
from builder.serving.gateway.residency.resident import Resident
from builder.serving.gateway.residency.residents import Residents
from builder.serving.gateway.residency.room import SERVER
from builder.serving.gateway.settings import OnDemand as Options
from builder.serving.gateway.settings import Settings
from builder.serving.plan.process import PROCESS
from tests.serving.gateway.asgi import Answer, ask
from tests.serving.gateway.fake_control import SIZE, FakeServer, make_models, serve

ONE = PROCESS + SIZE
NOWHERE = "127.0.0.1:1"  # no process listens there: the memory of models is estimated

Ask = Callable[..., Awaitable[Answer]]


class Case:
    """A gateway over a FakeServer with memory for that many models."""

    def __init__(self, repository: Path, room: float = 3, pins: tuple[str, ...] = (), **settings: Any) -> None:
        self.triton = FakeServer(repository)
        options = Options(repository, SERVER + int(room * ONE), pins, settings.pop("verify_key", None))
        parts = make_on_demand(Settings(triton=NOWHERE, **settings), options, self.triton, None)
        self.app: Journal = parts[0]
        self.backend: OnDemand = parts[1]
        taken = self.backend.residents.room
        taken.now = lambda: 0.0  # loads take no time, and a model may go as soon as it has answered

    async def embed(self, name: str, text: str = "text", **options: Any) -> Answer:
        return await ask(self.app, "/v1/embeddings", {"model": name, "input": text}, **options)

    async def write(self, name: str, tokens: int = 3, **options: Any) -> Answer:
        body = {"model": name, "prompt": "Once", "max_tokens": tokens, "stream": True}
        return await ask(self.app, "/v1/completions", body, **options)

    @property
    def leases(self) -> int:
        return sum(resident.leases for resident in self.backend.residents.models.values())

    @property
    def waiting(self) -> int:
        return sum(resident.waiting for resident in self.backend.residents.models.values())


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(300):
        while not condition():
            await asyncio.sleep(0.001)


def test_models_that_are_not_loaded_are_listed_and_answer(tmp_path: Path) -> None:
    make_models(tmp_path, "embeds-a", "writes", engine=True)
    case = Case(tmp_path, room=4)

    async def run() -> None:
        models = (await ask(case.app, "/v1/models")).json["data"]
        assert [model["id"] for model in models] == ["embeds-a", "writes"], "and no engine"
        assert not case.triton.loads
        assert (await case.embed("embeds-a")).status == 200
        assert case.triton.loads == ["embeds-a_model", "embeds-a"], "the engine before the front that calls it"
        for wrong in ("embeds-a_model", "other", "../embeds-a", "embeds-a/1", ""):
            assert (await case.embed(wrong)).status == 404, wrong
        assert case.leases == 0

    asyncio.run(run())


def test_one_load_for_all_who_ask_and_no_wait_for_that_of_another(tmp_path: Path) -> None:
    make_models(tmp_path, "embeds-a", "embeds-b")
    case = Case(tmp_path)
    case.triton.may_load = may_load = asyncio.Event()

    async def run() -> None:
        requests = [asyncio.ensure_future(case.embed(name)) for name in ("embeds-a", "embeds-b") * 20]
        await until(lambda: case.waiting == 40 and case.triton.at_once == 2)
        may_load.set()
        assert {(await request).status for request in requests} == {200}
        assert sorted(case.triton.loads) == ["embeds-a", "embeds-b"]
        text = (await ask(case.app, "/metrics")).pieces[0].decode()
        assert "build_repo_gateway_model_loads_total 2.0" in text
        assert "build_repo_gateway_cold_requests_total 40.0" in text
        assert "build_repo_gateway_model_load_seconds_count 2.0" in text
        assert "build_repo_gateway_resident_models 2.0" in text

    asyncio.run(run())


def test_what_was_not_asked_for_longest_goes_and_what_is_pinned_does_not(tmp_path: Path) -> None:
    names = [f"embeds-{letter}" for letter in "abcd"]
    make_models(tmp_path, *names)
    case = Case(tmp_path, pins=("embeds-a",))

    async def run() -> None:
        for name in ("embeds-a", "embeds-b", "embeds-c", "embeds-b", "embeds-d", "embeds-c"):
            assert (await case.embed(name)).status == 200
        assert case.triton.unloads == ["embeds-c", "embeds-b"]
        assert sorted(case.triton.loaded) == ["embeds-a", "embeds-c", "embeds-d"]

    asyncio.run(run())


def test_a_front_and_its_engine_go_together(tmp_path: Path) -> None:
    make_models(tmp_path, "embeds-a", "embeds-b", engine=True)
    case = Case(tmp_path, room=2)

    async def run() -> None:
        for name in ("embeds-a", "embeds-b"):
            assert (await case.embed(name)).status == 200
        assert sorted(case.triton.loaded) == ["embeds-b", "embeds-b_model"]
        assert case.triton.unloads == ["embeds-a", "embeds-a_model"], "the front first"

    asyncio.run(run())


def test_a_model_stays_until_its_streams_have_ended(tmp_path: Path) -> None:
    make_models(tmp_path, "writes-a", "embeds-b")
    case = Case(tmp_path, room=1)
    case.triton.may_answer = may_answer = asyncio.Event()

    async def run() -> None:
        stream = asyncio.ensure_future(case.write("writes-a", 40))
        await until(lambda: case.triton.in_use["writes-a"] == 1)
        other = asyncio.ensure_future(case.embed("embeds-b"))
        await until(lambda: bool(case.backend.residents.room.seekers))
        assert not case.triton.unloads
        may_answer.set()
        assert (await other).status == 200
        assert stream.done()
        assert len((await stream).events) == 41
        assert case.triton.unloads == ["writes-a"]
        assert not case.triton.unloaded_in_use

    asyncio.run(run())


def test_no_room_is_said_after_a_while_and_what_never_fits_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "ROOM_S", 0.02)
    make_models(tmp_path, "writes-a", "embeds-b", "embeds-large")
    (tmp_path / "embeds-large" / "1" / "weights").write_bytes(b"x" * 3 * 10**6)
    case = Case(tmp_path, room=1)
    case.triton.may_answer = may_answer = asyncio.Event()

    async def run() -> None:
        stream = asyncio.ensure_future(case.write("writes-a", 40))
        await until(lambda: case.triton.in_use["writes-a"] == 1)
        refused = await case.embed("embeds-b")
        assert (refused.status, refused.error["code"]) == (503, "no_room")
        assert "retry-after" in refused.headers
        large = await case.embed("embeds-large")
        assert (large.status, large.error["code"]) == (507, "model_too_large")
        assert "embeds-large needs 87 MB and at most 84 MB can be free" in large.error["message"]
        may_answer.set()
        assert (await stream).status == 200
        assert case.leases == 0

    asyncio.run(run())


def test_only_what_is_signed_is_loaded_where_a_key_says_so(tmp_path: Path) -> None:
    """It includes versions that are published while the gateway runs."""
    key = ec.generate_private_key(ec.SECP256R1())
    private, public = tmp_path / "private.pem", tmp_path / "public.pem"
    private.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    public.write_bytes(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    repository = tmp_path / "model_repository"
    make_models(repository, "embeds-a", "embeds-b")
    for name in ("embeds-a", "embeds-b"):
        shutil.copyfile(repository / name / "config.pbtxt", repository / name / "1" / "config.pbtxt")
    sign(repository, Signer(private), ["embeds-b"])
    case = Case(repository, verify_key=public)

    async def run() -> None:
        refused = await case.embed("embeds-a")
        assert (refused.status, refused.error["code"]) == (503, "model_failed")
        assert "embeds-a: version 1 is not signed" in refused.error["message"]
        assert f"build-repo verify {repository} --key {public}" in refused.error["message"]
        assert (await case.embed("embeds-b")).status == 200
        assert case.triton.tried == ["embeds-b"]

    asyncio.run(run())


def test_a_model_that_does_not_load_is_left_alone_for_a_while(tmp_path: Path) -> None:
    make_models(tmp_path, "embeds-a", "embeds-b", versions=2)
    case = Case(tmp_path)
    clock = [0.0]
    case.backend.residents.backoff.now = lambda: clock[0]
    case.triton.broken["embeds-a"] = "no file model.onnx"

    async def run() -> None:
        for _ in range(2):
            refused = await case.embed("embeds-a")
            assert (refused.status, refused.error["code"], refused.headers["retry-after"]) == (503, "model_failed", "1")
            assert "no file model.onnx" in refused.error["message"]
        assert case.triton.tried == ["embeds-a"], "the second request asked nothing of Triton"
        assert (await case.embed("embeds-b")).status == 200
        clock[0] = 1.5
        assert (await case.embed("embeds-a")).headers["retry-after"] == "2"
        case.triton.broken.clear()
        assert (await case.embed("embeds-a")).status == 503
        await asyncio.to_thread(serve, tmp_path, "embeds-a", 1)
        assert (await case.embed("embeds-a")).status == 200, "what has changed is tried at once"

    asyncio.run(run())


def test_only_so_many_wait_for_a_model_to_be_loaded(tmp_path: Path) -> None:
    make_models(tmp_path, "writes-a")
    case = Case(tmp_path, max_waiting=2)
    case.triton.may_load = may_load = asyncio.Event()

    async def run() -> None:
        requests = [asyncio.ensure_future(case.write("writes-a")) for _ in range(5)]
        await until(lambda: case.waiting == 2 and sum(request.done() for request in requests) == 3)
        may_load.set()
        answers = await asyncio.gather(*requests)
        assert sorted(answer.status for answer in answers) == [200, 200, 429, 429, 429]
        assert {answer.headers.get("retry-after") for answer in answers} == {None, "2"}

    asyncio.run(run())


def test_who_leaves_while_a_model_is_loaded_ends_nothing_for_the_others(tmp_path: Path) -> None:
    make_models(tmp_path, "embeds-a", "embeds-b")
    case = Case(tmp_path)
    case.triton.may_load = may_load = asyncio.Event()

    async def run() -> None:
        stays = asyncio.ensure_future(case.embed("embeds-a"))
        for name in ("embeds-a", "embeds-b"):
            assert (await case.embed(name, leave_after=0)).status == 0
        assert not case.triton.loaded
        may_load.set()
        assert (await stays).status == 200
        await until(lambda: "embeds-b" in case.triton.loaded)
        assert case.leases == 0
        assert sorted(case.triton.loads) == ["embeds-a", "embeds-b"]

    asyncio.run(run())


def test_a_version_that_was_gone_back_to_answers_the_next_request(tmp_path: Path) -> None:
    make_models(tmp_path, "writes-a", versions=2)
    case = Case(tmp_path)
    case.triton.may_answer = may_answer = asyncio.Event()

    async def run() -> None:
        stream = asyncio.ensure_future(case.write("writes-a", 40))
        await until(lambda: case.triton.in_use["writes-a"] == 1)
        case.triton.may_answer = None
        await asyncio.to_thread(serve, tmp_path, "writes-a", 1)
        assert (await case.write("writes-a")).status == 200
        assert case.triton.answered == [("writes-a", "2"), ("writes-a", "1")]
        assert not stream.done(), "what runs is finished by the version that it began with"
        may_answer.set()
        assert (await stream).status == 200
        assert case.triton.unloads == []
        models = (await ask(case.app, "/v1/models/writes-a")).json
        assert models["version"] == "1"

    asyncio.run(run())


def test_a_version_that_does_not_load_takes_the_place_of_none(tmp_path: Path) -> None:
    make_models(tmp_path, "embeds-a", versions=2)
    case = Case(tmp_path)

    async def run() -> None:
        assert (await case.embed("embeds-a")).status == 200
        case.triton.broken["embeds-a"] = "no file model.onnx"
        await asyncio.to_thread(serve, tmp_path, "embeds-a", 1)
        assert [(await case.embed("embeds-a")).status for _ in range(2)] == [200, 200]
        assert case.triton.answered == [("embeds-a", "2")] * 3
        assert case.triton.unloads == []

    asyncio.run(run())


def test_a_version_that_does_not_fit_beside_the_one_before_takes_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: requests waited a minute for memory that could not come free; then the earlier version answered."""
    monkeypatch.setattr(room, "ROOM_S", 300)
    make_models(tmp_path, "writes-a", versions=2, engine=True)
    case = Case(tmp_path, room=3)
    case.triton.may_answer = may_answer = asyncio.Event()

    async def run() -> None:
        stream = asyncio.ensure_future(case.write("writes-a", 40))
        await until(lambda: case.triton.in_use["writes-a"] == 1)
        await asyncio.to_thread(serve, tmp_path, "writes-a", 1)
        await asyncio.to_thread(serve, tmp_path, "writes-a_model", 1)
        next_one = asyncio.ensure_future(case.write("writes-a"))
        await until(lambda: case.waiting == 1)
        may_answer.set()
        assert [(await asked).status for asked in (stream, next_one)] == [200, 200]
        assert case.triton.answered == [("writes-a", "2"), ("writes-a", "1")]
        assert case.triton.unloads == ["writes-a", "writes-a_model"]
        assert not case.triton.unloaded_in_use
        assert case.leases == 0

    asyncio.run(run())


def test_a_version_that_took_the_place_of_another_and_does_not_load_says_so(tmp_path: Path) -> None:
    make_models(tmp_path, "embeds-a", versions=2)
    case = Case(tmp_path, room=1.5)

    async def run() -> None:
        assert (await case.embed("embeds-a")).status == 200
        case.triton.broken["embeds-a"] = "no file model.onnx"
        await asyncio.to_thread(serve, tmp_path, "embeds-a", 1)
        refused = await case.embed("embeds-a")
        assert (refused.status, refused.error["code"]) == (503, "model_failed")
        assert "no file model.onnx" in refused.error["message"]
        del case.triton.broken["embeds-a"]
        await asyncio.to_thread(serve, tmp_path, "embeds-a", 2)
        assert (await case.embed("embeds-a")).status == 200
        assert case.triton.answered == [("embeds-a", "2")] * 2
        assert case.backend.residents.room.used() == SERVER + ONE

    asyncio.run(run())


def test_a_version_that_waits_for_room_in_vain_keeps_nobody_waiting_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "ROOM_S", 0.02)
    make_models(tmp_path, "writes-a", "embeds-b", versions=2)
    case = Case(tmp_path, room=2)

    async def run() -> None:
        assert (await case.embed("embeds-b")).status == 200
        case.triton.may_answer = may_answer = asyncio.Event()
        stream = asyncio.ensure_future(case.write("writes-a", 40))
        await until(lambda: case.triton.in_use["writes-a"] == 1)
        case.triton.may_answer = None
        await asyncio.to_thread(serve, tmp_path, "embeds-b", 1)
        assert (await case.embed("embeds-b")).status == 200
        residents = case.backend.residents
        assert residents.backoff.failures["embeds-b"].stamp == residents.offered.offer("embeds-b").stamp
        may_answer.set()
        assert (await stream).status == 200
        assert {("embeds-b", "2"), ("writes-a", "2")} == set(case.triton.answered)

    asyncio.run(run())


def test_a_model_whose_process_died_is_loaded_again_for_those_who_asked(tmp_path: Path) -> None:
    make_models(tmp_path, "embeds-a", "writes-b")
    case = Case(tmp_path)

    async def run() -> None:
        asks: list[Ask] = [partial(case.embed, "embeds-a"), partial(case.write, "writes-b")]
        for request in asks:
            assert (await request()).status == 200
            case.triton.dead.update(case.triton.loaded)
            answers = await asyncio.gather(*(request() for _ in range(3)))
            assert {answer.status for answer in answers} == {200}
        assert case.triton.loads.count("embeds-a") == 2
        assert case.leases == 0
        case.backend.residents.backoff.failures.clear()
        case.backend.residents.backoff.now = lambda: 0.0  # nothing of a wait is over before it begins
        case.triton.killed.add("embeds-a")
        case.triton.loaded.clear()
        assert (await case.embed("embeds-a")).status == 200, "killed while it was loaded"
        case.triton.dead.add("embeds-a")
        begun = time.monotonic()
        assert (await case.embed("embeds-a")).status == 200, "twice within a minute"
        assert time.monotonic() - begun > 0.9, "it waited for the second attempt"
        case.triton.dead.add("embeds-a")
        refused = await case.embed("embeds-a")
        assert (refused.status, refused.error["code"], refused.headers["retry-after"]) == (503, "model_failed", "3")

    asyncio.run(run())


def test_a_model_that_had_answered_for_a_while_before_it_died_is_mended_at_once(tmp_path: Path) -> None:
    make_models(tmp_path, "embeds-a")
    case, clock = Case(tmp_path), [0.0]
    for known in (case.backend.residents.room, case.backend.residents.backoff):
        known.now = lambda: clock[0]

    async def run() -> None:
        assert (await case.embed("embeds-a")).status == 200
        for _ in range(5):
            clock[0] += ANSWERED_S
            case.triton.dead.add("embeds-a")
            assert (await case.embed("embeds-a")).status == 200
        assert case.triton.loads.count("embeds-a") == 6

    asyncio.run(run())


def test_requests_that_a_dead_process_never_answers_are_asked_again(tmp_path: Path) -> None:
    make_models(tmp_path, "embeds-a", "embeds-b")
    case = Case(tmp_path)

    async def run() -> None:
        assert (await case.embed("embeds-a")).status == 200
        case.triton.hung.add("embeds-a")
        requests = [asyncio.ensure_future(case.embed("embeds-a")) for _ in range(3)]
        await until(lambda: case.triton.in_use["embeds-a"] == 3)
        assert (await case.embed("embeds-b")).status == 200
        case.backend.residents.models["embeds-a"].earlier = frozenset({7})
        case.backend.residents.ended("embeds-a", 7)
        assert not any(answer.done() for answer in requests), "a process of an earlier load"
        case.triton.dead.add("embeds-a")
        assert (await case.embed("embeds-a")).status == 200
        assert [(await answer).status for answer in requests] == [200, 200, 200]
        assert case.triton.loads.count("embeds-a") == 2
        assert case.leases == 0
        case.triton.may_load = asyncio.Event()
        case.triton.loaded.pop("embeds-b")
        stuck = asyncio.ensure_future(case.embed("embeds-b"))
        await until(lambda: case.triton.at_once == 1)
        case.backend.residents.ended("embeds-b", 8)
        assert (await stuck).error["code"] == "model_failed"

    asyncio.run(run())


def test_what_others_load_and_unload_is_noticed(tmp_path: Path) -> None:
    make_models(tmp_path, "embeds-a", "embeds-b", "embeds-c", versions=2)
    case = Case(tmp_path, room=4, pins=("embeds-c",))

    async def run() -> None:
        case.triton.loaded.update({"embeds-a": "2", "embeds-b": "1"})
        watching = asyncio.ensure_future(case.backend.watch())
        await until(lambda: "embeds-c" in case.triton.loaded)
        watching.cancel()
        assert sorted(case.backend.residents.models) == ["embeds-a", "embeds-b", "embeds-c"]
        assert (await case.embed("embeds-a")).status == 200
        assert case.triton.loads == ["embeds-c"]
        assert (await case.embed("embeds-b")).status == 200
        assert case.triton.answered[-1] == ("embeds-b", "2"), "which is the one that the repository serves"
        del case.triton.loaded["embeds-a"]
        assert (await case.embed("embeds-a")).status == 200

    asyncio.run(run())


def test_what_was_loaded_before_the_gateway_counts_and_goes_with_its_engine(tmp_path: Path) -> None:
    """Regression: it took none of the budget if Triton's processes cannot be seen, and its engine stayed for ever."""
    make_models(tmp_path, "embeds-a", "embeds-b", engine=True)
    case = Case(tmp_path, room=2)

    async def run() -> None:
        case.triton.loaded.update({"embeds-a": "1", "embeds-a_model": "1"})
        watching = asyncio.ensure_future(case.backend.watch())
        await until(lambda: "embeds-a" in case.backend.residents.models)
        watching.cancel()
        assert case.backend.residents.room.used() == SERVER + 2 * ONE
        assert (await case.embed("embeds-b")).status == 200
        assert case.triton.unloads == ["embeds-a", "embeds-a_model"]

    asyncio.run(run())


def test_what_cannot_all_go_goes_as_far_as_it_can(tmp_path: Path) -> None:
    """Regression: nothing was unloaded if a model in use had grown by more than all others take."""
    make_models(tmp_path, "writes-a", "embeds-b", "embeds-c")
    case = Case(tmp_path, room=3)

    async def run() -> None:
        assert (await case.embed("embeds-b")).status == 200
        case.triton.may_answer = may_answer = asyncio.Event()
        stream = asyncio.ensure_future(case.write("writes-a", 40))
        await until(lambda: case.triton.in_use["writes-a"] == 1)
        case.backend.residents.measured(SERVER, {"writes-a": 5 * ONE})
        await until(lambda: case.triton.unloads == ["embeds-b"])
        may_answer.set()
        assert (await stream).status == 200

    asyncio.run(run())


def test_who_has_just_left_is_given_no_room() -> None:
    """Regression: the request that had made the room failed."""

    async def run() -> None:
        taken = room.Room(SERVER + ONE, (), lambda resident: None, lambda: 0.0)
        busy, comes = (Resident(name, None, "1") for name in ("busy", "comes"))
        busy.size = ONE
        taken.models.update({"busy": busy, "comes": comes})
        seeks = asyncio.ensure_future(taken.wait_for(comes, ONE))
        await until(lambda: bool(taken.seekers))
        seeks.cancel()
        del taken.models["busy"]
        taken.make()
        assert not comes.has_room
        await asyncio.wait({seeks})

    asyncio.run(run())


def test_a_folder_that_cannot_be_read_for_a_moment_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the budget and dead processes were no longer checked."""
    make_models(tmp_path, "embeds-a")
    case = Case(tmp_path, pins=("embeds-a",))

    def stale(entry: Path) -> list[int]:
        raise OSError(errno.ESTALE, "Stale file handle")

    async def run() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(offered, "numbers", stale)
            refused = await case.embed("embeds-a")
            assert (refused.status, "Stale file handle" in refused.error["message"]) == (503, True)
            case.triton.loaded["embeds-a"] = "1"
            watching = asyncio.ensure_future(case.backend.watch())
            await asyncio.sleep(0)
            await asyncio.sleep(0.05)
            assert not watching.done()
        watching.cancel()
        assert (await case.embed("embeds-a")).status == 200

    asyncio.run(run())


def test_what_cannot_be_read_for_a_moment_is_not_called_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: clients do not retry after a 404, and the list of models was a traceback."""
    make_models(tmp_path, "embeds-a")
    case = Case(tmp_path)

    def stale(*_: object) -> None:
        raise OSError(errno.ESTALE, "Stale file handle")

    async def run() -> None:
        assert (await case.embed("embeds-a")).status == 200
        with monkeypatch.context() as patch:
            patch.setattr(offered, "_stamp", stale)
            refused = await case.embed("embeds-a")
            assert (refused.status, refused.error["code"]) == (503, "unavailable")
            patch.setattr(os, "scandir", stale)
            listed = await ask(case.app, "/v1/models", None)
            assert (listed.status, "Stale file handle" in listed.error["message"]) == (503, True)
        assert (await case.embed("embeds-a")).status == 200
        assert (await case.embed("x" * 300)).status == 404, "longer than a file's name may be"

    asyncio.run(run())


class Slow:
    """Loading whose loads take five seconds on a clock of its own."""

    def __init__(self) -> None:
        self.clock = 0.0
        self.unloads: list[str] = []

    async def needs(self, name: str, version: str) -> Needs:
        return Needs(ONE, ())

    async def load(self, resident: Resident, *, instead: bool) -> int | None:
        self.clock += 5
        return None

    async def unload(self, name: str) -> None:
        self.unloads.append(name)


def test_a_model_stays_as_long_as_its_load_took(tmp_path: Path) -> None:
    make_models(tmp_path, "embeds-a", "embeds-b")
    loading = Slow()

    async def run() -> None:
        measures = Measures(CollectorRegistry())
        lifecycle = Lifecycle(Offered(tmp_path), loading, measures, SERVER + ONE, now=lambda: loading.clock)
        residents = Residents(lifecycle)
        residents.release(await residents.lease("embeds-a"))
        waits = asyncio.ensure_future(residents.lease("embeds-b"))
        await until(lambda: bool(residents.room.seekers))
        residents.measured(SERVER, {})
        assert not loading.unloads
        loading.clock += 5
        residents.measured(SERVER, {})
        await waits
        assert loading.unloads == ["embeds-a"]

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # as the gateway's process does
        runner.run(run())


def test_models_that_grew_go_until_what_is_left_fits(tmp_path: Path) -> None:
    make_models(tmp_path, "embeds-a", "embeds-b", "embeds-c")
    case = Case(tmp_path, room=3)

    async def run() -> None:
        for name in ("embeds-a", "embeds-b", "embeds-c"):
            assert (await case.embed(name)).status == 200
        case.backend.residents.measured(SERVER, {"embeds-c": 2 * ONE})
        await until(lambda: bool(case.triton.unloads))
        assert case.triton.unloads == ["embeds-a"]
        assert case.backend.residents.room.used() <= case.backend.residents.room.budget

    asyncio.run(run())


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--memory-gb", "1"], "--load-on-demand"),
        (["--load-on-demand", "--repository", "{here}", "--pin", "other"], "has no other"),
        (["--load-on-demand", "--repository", "{here}/none"], "has no models"),
        (["--verify-key", "key.pem"], "--load-on-demand"),
        (["--load-on-demand", "--repository", "{here}", "--verify-key", "{here}/none.pem"], "none.pem cannot verify"),
    ],
)
def test_options_that_cannot_be_meant(options: list[str], says: str, tmp_path: Path) -> None:
    from builder.commands import gateway

    options_given = gateway.parser().parse_args([option.format(here=tmp_path) for option in options])
    with pytest.raises(SpecError, match=says):
        gateway.run(options_given)


def test_serve_hands_what_it_was_told_to_the_gateway_that_loads(tmp_path: Path) -> None:
    from builder.commands import gateway, serve

    options = ["--load-on-demand", "--memory-gb", "2", "--pin", "a", "--verify-key", str(tmp_path / "key.pem")]
    parsed = serve.parser().parse_args([str(tmp_path), "--openai-port", "9000", *options])
    taken = vars(gateway.parser().parse_args(serve._on_demand(parsed)))
    assert {name: taken[name] for name in ("load_on_demand", "repository", "memory_gb", "pin", "verify_key")} == {
        "load_on_demand": True,
        "repository": tmp_path,
        "memory_gb": 2.0,
        "pin": ["a"],
        "verify_key": tmp_path / "key.pem",
    }


def test_a_request_that_quotes_what_triton_says_unloads_nothing(tmp_path: Path) -> None:
    make_models(tmp_path, "embeds-a")
    case = Case(tmp_path)
    error = ApiError(400, "text_input is 'Request for unknown model: x is not healthy'")

    async def run() -> None:
        resident = await case.backend.residents.lease("embeds-a")
        assert not case.backend._has_gone(resident, error)
        assert case.triton.unloads == []

    asyncio.run(run())
