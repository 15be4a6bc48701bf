"""Loading on demand on a real Triton: copies of one model, told apart by their labels."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from builder.repository.versions import rollback
from builder.serving.gateway.residency.backend import make_on_demand_app
from builder.serving.gateway.residency.memory import size_of
from builder.serving.gateway.settings import GatewaySettings, OnDemandSettings
from builder.serving.gateway.triton import Triton
from builder.serving.server.triton import TritonServer, running
from scripts.benchmarks.fleet_copies import copy
from tests.serving.gateway.asgi import ask

NAMES = ("a", "b", "c")
AMPLE = 4_000_000_000


@pytest.mark.slow
def test_models_are_loaded_on_demand_and_evicted_for_others(small_repository: Path, tmp_path: Path) -> None:
    repository = tmp_path / "model_repository"
    for name in NAMES:
        copy(small_repository / "topics", repository, name)
    with running(repository, on_demand=True) as server:
        assert {model.state for model in server.models()} == {"-"}, "nothing is loaded yet"
        asyncio.run(tried(server, repository))


async def tried(server: TritonServer, repository: Path) -> None:
    triton = Triton(server.url)
    app, backend = make_on_demand_app(
        GatewaySettings(triton=server.url), OnDemandSettings(repository, AMPLE), triton, None
    )
    watching = asyncio.ensure_future(backend.watch())
    residents, processes = backend.residents, backend.processes

    async def label(name: str) -> str:
        answer = await ask(app, "/v1/tasks/text-classification", {"model": name, "inputs": "The soup needs salt."})
        assert answer.status == 200, answer.json
        return str(answer.json[0][0]["label"])

    assert (await label("a")).startswith("a/2/")
    expected = await residents.loader.estimate("b", "2")
    largest = max(expected.size, residents.models["a"].size)
    budget = residents.budget
    budget.total = budget.server + largest + residents.models["a"].size // 2  # the server and one model
    for name in ("b", "c", "a"):
        assert (await label(name)).startswith(f"{name}/2/")
        assert budget.used() <= budget.total
    metrics = (await ask(app, "/metrics")).pieces[0].decode()
    assert "build_repo_gateway_model_evictions_total 0.0" not in metrics
    rollback(repository, "c", 1)
    answers = await asyncio.gather(*(label("c") for _ in range(4)))
    assert all(answer.startswith("c/1/") for answer in answers)

    def alive() -> list[int]:
        return [stub.pid for stub in processes.of(["c"]) if stub.is_alive]

    while len(alive()) > 1:  # the process of the other version takes a second to end
        await asyncio.sleep(0.05)
    (process,) = alive()
    assert size_of(process) > 10_000_000
    os.kill(process, signal.SIGKILL)
    answers = await asyncio.gather(*(label("c") for _ in range(4)))
    assert all(answer.startswith("c/1/") for answer in answers)
    assert process not in alive()
    watching.cancel()
    await triton.close()
