"""Loading on demand when loads fail, processes die or the folder is unreadable."""

from __future__ import annotations

import asyncio
import errno
import os
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import pytest

from builder.serving.gateway.errors import ApiError
from builder.serving.gateway.residency import backend, repository_models
from builder.serving.gateway.residency.backoff import STABLE_AFTER_S
from builder.serving.gateway.residency.loader import TritonLoader
from tests.serving.gateway.asgi import Answer, ask
from tests.serving.gateway.fake_control import make_models, serve
from tests.serving.gateway.on_demand import Case, until

Ask = Callable[..., Awaitable[Answer]]


async def test_failed_load_backs_off_until_the_model_changes(tmp_path: Path) -> None:
    make_models(tmp_path, "embeds-a", "embeds-b", versions=2)
    case = Case(tmp_path)
    clock = [0.0]
    case.backend.residents.backoff.now = lambda: clock[0]
    case.triton.broken["embeds-a"] = "no file model.onnx"
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


async def test_failed_load_is_reported_in_the_shape_of_each_route(tmp_path: Path) -> None:
    """Regression: requests that waited for the same load got TEI's shape once one of them was in that shape."""
    make_models(tmp_path, "ranks-a")
    case = Case(tmp_path)
    case.triton.broken["ranks-a"] = "no file model.onnx"
    body = {"model": "ranks-a", "query": "q"}
    tei, cohere = await asyncio.gather(
        ask(case.app, "/rerank", {**body, "texts": ["a"]}),
        ask(case.app, "/v1/rerank", {**body, "documents": ["a"]}),
    )
    assert (tei.status, tei.json["error_type"]) == (503, "Unhealthy")
    assert (cohere.status, cohere.error["code"]) == (503, "model_failed")


async def test_dead_model_is_reloaded_for_its_requests(tmp_path: Path) -> None:
    make_models(tmp_path, "embeds-a", "writes-b")
    case = Case(tmp_path)
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


async def test_stable_model_that_died_is_reloaded_at_once(tmp_path: Path) -> None:
    make_models(tmp_path, "embeds-a")
    case, clock = Case(tmp_path), [0.0]
    for known in (case.backend.residents.budget, case.backend.residents.backoff):
        known.now = lambda: clock[0]
    assert (await case.embed("embeds-a")).status == 200
    for _ in range(5):
        clock[0] += STABLE_AFTER_S
        case.triton.dead.add("embeds-a")
        assert (await case.embed("embeds-a")).status == 200
    assert case.triton.loads.count("embeds-a") == 6


async def test_requests_of_a_dead_process_are_retried(tmp_path: Path) -> None:
    make_models(tmp_path, "embeds-a", "embeds-b")
    case = Case(tmp_path)
    assert (await case.embed("embeds-a")).status == 200
    case.triton.hung.add("embeds-a")
    requests = [asyncio.ensure_future(case.embed("embeds-a")) for _ in range(3)]
    await until(lambda: case.triton.in_use["embeds-a"] == 3)
    assert (await case.embed("embeds-b")).status == 200
    case.backend.residents.models["embeds-a"].earlier = frozenset({7})
    case.backend.residents.handle_dead_process("embeds-a", 7)
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
    case.backend.residents.handle_dead_process("embeds-b", 8)
    assert (await stuck).error["code"] == "model_failed"


async def test_unreadable_folder_does_not_end_the_watch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: the budget and dead processes were no longer checked."""
    make_models(tmp_path, "embeds-a")
    case = Case(tmp_path, pins=("embeds-a",))

    def stale(entry: Path) -> list[int]:
        raise OSError(errno.ESTALE, "Stale file handle")

    with monkeypatch.context() as patch:
        patch.setattr(repository_models, "version_numbers", stale)
        refused = await case.embed("embeds-a")
        assert (refused.status, "Stale file handle" in refused.error["message"]) == (503, True)
        case.triton.loaded["embeds-a"] = "1"
        watching = asyncio.ensure_future(case.backend.watch())
        await asyncio.sleep(0)
        await asyncio.sleep(0.05)
        assert not watching.done()
    watching.cancel()
    assert (await case.embed("embeds-a")).status == 200


async def test_defect_of_one_check_does_not_end_the_watch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Regression: it ended, and of one Triton among several without a word."""
    monkeypatch.setattr(backend, "DEATH_CHECK_INTERVAL_S", 0.001)
    make_models(tmp_path, "embeds-a")
    case = Case(tmp_path, pins=("embeds-a",))

    def stale(*_: object) -> None:
        raise OSError(errno.ESTALE, "Stale file handle")

    with monkeypatch.context() as patch:
        patch.setattr(TritonLoader, "_refuse_unsigned", stale)
        watching = asyncio.ensure_future(case.backend.watch())
        await until(lambda: "Stale file handle" in caplog.text)
    await until(lambda: "embeds-a" in case.triton.loaded)
    watching.cancel()


async def test_unreadable_model_is_503_and_not_404(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: clients do not retry after a 404, and the list of models was a traceback."""
    make_models(tmp_path, "embeds-a")
    case = Case(tmp_path)

    def stale(*_: object) -> None:
        raise OSError(errno.ESTALE, "Stale file handle")

    assert (await case.embed("embeds-a")).status == 200
    with monkeypatch.context() as patch:
        patch.setattr(repository_models, "_stamp", stale)
        refused = await case.embed("embeds-a")
        assert (refused.status, refused.error["code"]) == (503, "unavailable")
        patch.setattr(os, "scandir", stale)
        listed = await ask(case.app, "/v1/models", None)
        assert (listed.status, "Stale file handle" in listed.error["message"]) == (503, True)
    assert (await case.embed("embeds-a")).status == 200
    assert (await case.embed("x" * 300)).status == 404, "longer than a file's name may be"


async def test_request_that_quotes_triton_errors_unloads_nothing(tmp_path: Path) -> None:
    make_models(tmp_path, "embeds-a")
    case = Case(tmp_path)
    error = ApiError(400, "text_input is 'Request for unknown model: x is not healthy'")
    resident = await case.backend.residents.lease("embeds-a")
    assert not case.backend._handle_if_unloaded(resident, error)
    assert case.triton.unloads == []
