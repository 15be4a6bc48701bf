"""Loading on demand when another version is served: replacement, failure and rollback."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from builder.serving.gateway.residency import memory_budget
from builder.serving.gateway.residency.memory_budget import SERVER_BYTES
from tests.serving.gateway.asgi import ask
from tests.serving.gateway.fake_control import make_models, serve
from tests.serving.gateway.on_demand import ONE, Case, until


async def test_rolled_back_version_answers_the_next_request(tmp_path: Path) -> None:
    make_models(tmp_path, "writes-a", versions=2)
    case = Case(tmp_path)
    case.triton.may_answer = may_answer = asyncio.Event()
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


async def test_version_that_fails_to_load_replaces_none(tmp_path: Path) -> None:
    make_models(tmp_path, "embeds-a", versions=2)
    case = Case(tmp_path)
    assert (await case.embed("embeds-a")).status == 200
    case.triton.broken["embeds-a"] = "no file model.onnx"
    await asyncio.to_thread(serve, tmp_path, "embeds-a", 1)
    assert [(await case.embed("embeds-a")).status for _ in range(2)] == [200, 200]
    assert case.triton.answered == [("embeds-a", "2")] * 3
    assert case.triton.unloads == []


async def test_new_version_replaces_one_that_does_not_fit_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: requests waited a minute for memory that could not come free; then the earlier version answered."""
    monkeypatch.setattr(memory_budget, "MEMORY_TIMEOUT_S", 300)
    make_models(tmp_path, "writes-a", versions=2, engine=True)
    case = Case(tmp_path, room=3)
    case.triton.may_answer = may_answer = asyncio.Event()
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


async def test_replacing_version_that_fails_to_load_is_an_error(tmp_path: Path) -> None:
    make_models(tmp_path, "embeds-a", versions=2)
    case = Case(tmp_path, room=1.5)
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
    assert case.backend.residents.budget.used() == SERVER_BYTES + ONE


async def test_version_without_memory_backs_off_behind_the_running_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_budget, "MEMORY_TIMEOUT_S", 0.02)
    make_models(tmp_path, "writes-a", "embeds-b", versions=2)
    case = Case(tmp_path, room=2)
    assert (await case.embed("embeds-b")).status == 200
    case.triton.may_answer = may_answer = asyncio.Event()
    stream = asyncio.ensure_future(case.write("writes-a", 40))
    await until(lambda: case.triton.in_use["writes-a"] == 1)
    case.triton.may_answer = None
    await asyncio.to_thread(serve, tmp_path, "embeds-b", 1)
    assert (await case.embed("embeds-b")).status == 200
    residents = case.backend.residents
    assert residents.backoff.failures["embeds-b"].stamp == residents.repository_models.configured("embeds-b").stamp
    may_answer.set()
    assert (await stream).status == 200
    assert {("embeds-b", "2"), ("writes-a", "2")} == set(case.triton.answered)
