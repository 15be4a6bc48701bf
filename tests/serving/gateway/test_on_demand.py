"""Loading on demand over a stand-in for Triton: loads, evictions, waiting requests and refusals."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import pytest
import uvloop
from prometheus_client import CollectorRegistry

from builder.common.errors import SpecError
from builder.repository.signatures import sign
from builder.repository.signing_keys import Signer
from builder.serving.gateway.metrics import LoadingMetrics
from builder.serving.gateway.residency import memory_budget
from builder.serving.gateway.residency.loader import TritonLoader
from builder.serving.gateway.residency.memory import MemoryEstimate, estimate_memory
from builder.serving.gateway.residency.memory_budget import SERVER_BYTES
from builder.serving.gateway.residency.repository_models import RepositoryModels
from builder.serving.gateway.residency.resident_model import ResidentModel
from builder.serving.gateway.residency.resident_models import ResidentModels
from tests.serving.gateway.asgi import ask
from tests.serving.gateway.fake_control import make_models
from tests.serving.gateway.on_demand import ONE, Case, until
from tests.signing import write_keys


async def test_unloaded_models_are_listed_and_loaded_on_request(tmp_path: Path) -> None:
    make_models(tmp_path, "embeds-a", "writes", engine=True)
    case = Case(tmp_path, room=4)
    models = (await ask(case.app, "/v1/models")).json["data"]
    assert [model["id"] for model in models] == ["embeds-a", "writes"], "and no engine"
    assert not case.triton.loads
    assert (await case.embed("embeds-a")).status == 200
    assert case.triton.loads == ["embeds-a_model", "embeds-a"], "the engine before the front that calls it"
    for wrong in ("embeds-a_model", "other", "../embeds-a", "embeds-a/1", ""):
        assert (await case.embed(wrong)).status == 404, wrong
    assert case.leases == 0


async def test_requests_share_one_load_per_model(tmp_path: Path) -> None:
    make_models(tmp_path, "embeds-a", "embeds-b")
    case = Case(tmp_path)
    case.triton.may_load = may_load = asyncio.Event()
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


async def test_least_recently_used_model_is_evicted_unless_pinned(tmp_path: Path) -> None:
    names = [f"embeds-{letter}" for letter in "abcd"]
    make_models(tmp_path, *names)
    case = Case(tmp_path, pins=("embeds-a",))
    for name in ("embeds-a", "embeds-b", "embeds-c", "embeds-b", "embeds-d", "embeds-c"):
        assert (await case.embed(name)).status == 200
    assert case.triton.unloads == ["embeds-c", "embeds-b"]
    assert sorted(case.triton.loaded) == ["embeds-a", "embeds-c", "embeds-d"]


async def test_engine_is_unloaded_with_its_front(tmp_path: Path) -> None:
    make_models(tmp_path, "embeds-a", "embeds-b", engine=True)
    case = Case(tmp_path, room=2)
    for name in ("embeds-a", "embeds-b"):
        assert (await case.embed(name)).status == 200
    assert sorted(case.triton.loaded) == ["embeds-b", "embeds-b_model"]
    assert case.triton.unloads == ["embeds-a", "embeds-a_model"], "the front first"


async def test_model_stays_loaded_until_its_streams_end(tmp_path: Path) -> None:
    make_models(tmp_path, "writes-a", "embeds-b")
    case = Case(tmp_path, room=1)
    case.triton.may_answer = may_answer = asyncio.Event()
    stream = asyncio.ensure_future(case.write("writes-a", 40))
    await until(lambda: case.triton.in_use["writes-a"] == 1)
    other = asyncio.ensure_future(case.embed("embeds-b"))
    await until(lambda: bool(case.backend.residents.budget.pending))
    assert not case.triton.unloads
    may_answer.set()
    assert (await other).status == 200
    assert stream.done()
    assert len((await stream).events) == 41
    assert case.triton.unloads == ["writes-a"]
    assert not case.triton.unloaded_in_use


async def test_memory_timeout_is_503_and_too_large_is_507(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_budget, "MEMORY_TIMEOUT_S", 0.02)
    make_models(tmp_path, "writes-a", "embeds-b", "embeds-large")
    (tmp_path / "embeds-large" / "1" / "weights").write_bytes(b"x" * 3 * 10**6)
    case = Case(tmp_path, room=1)
    case.triton.may_answer = may_answer = asyncio.Event()
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


async def test_verify_key_loads_signed_models_only(tmp_path: Path) -> None:
    """It includes versions that are published while the gateway runs."""
    private, public = write_keys(tmp_path)
    repository = tmp_path / "model_repository"
    make_models(repository, "embeds-a", "embeds-b")
    for name in ("embeds-a", "embeds-b"):
        shutil.copyfile(repository / name / "config.pbtxt", repository / name / "1" / "config.pbtxt")
    sign(repository, Signer(private), ["embeds-b"])
    case = Case(repository, verify_key=public)
    refused = await case.embed("embeds-a")
    assert (refused.status, refused.error["code"]) == (503, "model_failed")
    assert "embeds-a: version 1 is not signed" in refused.error["message"]
    assert f"build-repo verify {repository} --key {public}" in refused.error["message"]
    assert (await case.embed("embeds-b")).status == 200
    assert case.triton.tried == ["embeds-b"]


async def test_gateway_is_ready_while_a_model_is_loaded(tmp_path: Path) -> None:
    """Regression: Triton reports that it is not ready meanwhile, and so did the gateway."""
    make_models(tmp_path, "embeds-a")
    case = Case(tmp_path)
    case.triton.may_load = may_load = asyncio.Event()
    loading = asyncio.ensure_future(case.embed("embeds-a"))
    await until(lambda: case.triton.at_once == 1)
    assert (await ask(case.app, "/health/ready")).status == 200
    may_load.set()
    assert (await loading).status == 200


async def test_requests_beyond_the_limit_do_not_wait_for_a_load(tmp_path: Path) -> None:
    make_models(tmp_path, "writes-a")
    case = Case(tmp_path, max_waiting=2)
    case.triton.may_load = may_load = asyncio.Event()
    requests = [asyncio.ensure_future(case.write("writes-a")) for _ in range(5)]
    await until(lambda: case.waiting == 2 and sum(request.done() for request in requests) == 3)
    may_load.set()
    answers = await asyncio.gather(*requests)
    assert sorted(answer.status for answer in answers) == [200, 200, 429, 429, 429]
    assert {answer.headers.get("retry-after") for answer in answers} == {None, "2"}


async def test_disconnect_during_a_load_keeps_other_requests(tmp_path: Path) -> None:
    make_models(tmp_path, "embeds-a", "embeds-b")
    case = Case(tmp_path)
    case.triton.may_load = may_load = asyncio.Event()
    stays = asyncio.ensure_future(case.embed("embeds-a"))
    for name in ("embeds-a", "embeds-b"):
        assert (await case.embed(name, disconnect_after=0)).status == 0
    assert not case.triton.loaded
    may_load.set()
    assert (await stays).status == 200
    await until(lambda: "embeds-b" in case.triton.loaded)
    assert case.leases == 0
    assert sorted(case.triton.loads) == ["embeds-a", "embeds-b"]


async def test_models_loaded_by_other_clients_are_adopted(tmp_path: Path) -> None:
    make_models(tmp_path, "embeds-a", "embeds-b", "embeds-c", versions=2)
    case = Case(tmp_path, room=4, pins=("embeds-c",))
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


async def test_model_loaded_earlier_counts_and_is_evicted_with_its_engine(tmp_path: Path) -> None:
    """Regression: it took none of the budget if Triton's processes cannot be seen, and its engine stayed for ever."""
    make_models(tmp_path, "embeds-a", "embeds-b", engine=True)
    case = Case(tmp_path, room=2)
    case.triton.loaded.update({"embeds-a": "1", "embeds-a_model": "1"})
    watching = asyncio.ensure_future(case.backend.watch())
    await until(lambda: "embeds-a" in case.backend.residents.models)
    watching.cancel()
    assert case.backend.residents.budget.used() == SERVER_BYTES + 2 * ONE
    assert (await case.embed("embeds-b")).status == 200
    assert case.triton.unloads == ["embeds-a", "embeds-a_model"]


async def test_evicts_what_it_can_when_too_little_is_evictable(tmp_path: Path) -> None:
    """Regression: nothing was unloaded if a model in use had grown by more than all others take."""
    make_models(tmp_path, "writes-a", "embeds-b", "embeds-c")
    case = Case(tmp_path, room=3)
    assert (await case.embed("embeds-b")).status == 200
    case.triton.may_answer = may_answer = asyncio.Event()
    stream = asyncio.ensure_future(case.write("writes-a", 40))
    await until(lambda: case.triton.in_use["writes-a"] == 1)
    case.backend.residents.record_usage(SERVER_BYTES, {"writes-a": 5 * ONE})
    await until(lambda: case.triton.unloads == ["embeds-b"])
    may_answer.set()
    assert (await stream).status == 200


async def test_cancelled_load_gets_no_memory() -> None:
    """Regression: the request that had made the room failed."""
    taken = memory_budget.MemoryBudget(SERVER_BYTES + ONE, (), lambda resident: None, lambda: 0.0)
    busy, comes = (ResidentModel(name, None, "1") for name in ("busy", "comes"))
    busy.size = ONE
    taken.models.update({"busy": busy, "comes": comes})
    seeks = asyncio.ensure_future(taken.wait_for(comes, ONE))
    await until(lambda: bool(taken.pending))
    seeks.cancel()
    del taken.models["busy"]
    taken.rebalance()
    assert not comes.has_memory
    await asyncio.wait({seeks})


def test_memory_of_a_model_counts_the_adapters_of_each_instance(tmp_path: Path) -> None:
    """Regression: an embedder with adapters was loaded where its stacks found no memory."""
    make_models(tmp_path, "embeds-a")
    config = tmp_path / "embeds-a" / "config.pbtxt"
    config.write_text(config.read_text() + "instance_group { count: 2 }")
    sizes = []
    for memory in ({"weights": 5}, {"weights": 5, "adapters": 1000}, {"cache": 10, "adapters": 1000}):
        (tmp_path / "embeds-a" / "build.json").write_text(json.dumps({"files": {}, "memory": memory}))
        sizes.append(estimate_memory(tmp_path, "embeds-a", 1).size)
    assert [size - sizes[0] for size in sizes] == [0, 2000, 2010]


class Slow(TritonLoader):
    """Loading whose loads take five seconds on a clock of its own."""

    def __init__(self) -> None:
        self.clock = 0.0
        self.unloads: list[str] = []

    async def estimate(self, name: str, version: str) -> MemoryEstimate:
        return MemoryEstimate(ONE, ())

    async def load(self, resident: ResidentModel, *, replace: bool) -> int | None:
        self.clock += 5
        return None

    async def unload(self, name: str) -> None:
        self.unloads.append(name)


def test_model_stays_loaded_as_long_as_its_load_took(tmp_path: Path) -> None:
    make_models(tmp_path, "embeds-a", "embeds-b")
    loading = Slow()

    async def run() -> None:
        metrics = LoadingMetrics(CollectorRegistry())
        residents = ResidentModels(
            RepositoryModels(tmp_path), loading, metrics, SERVER_BYTES + ONE, now=lambda: loading.clock
        )
        residents.release(await residents.lease("embeds-a"))
        waits = asyncio.ensure_future(residents.lease("embeds-b"))
        await until(lambda: bool(residents.budget.pending))
        residents.record_usage(SERVER_BYTES, {})
        assert not loading.unloads
        loading.clock += 5
        residents.record_usage(SERVER_BYTES, {})
        await waits
        assert loading.unloads == ["embeds-a"]

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # as the gateway's process does
        runner.run(run())


async def test_grown_models_are_evicted_until_the_rest_fits(tmp_path: Path) -> None:
    make_models(tmp_path, "embeds-a", "embeds-b", "embeds-c")
    case = Case(tmp_path, room=3)
    for name in ("embeds-a", "embeds-b", "embeds-c"):
        assert (await case.embed(name)).status == 200
    case.backend.residents.record_usage(SERVER_BYTES, {"embeds-c": 2 * ONE})
    await until(lambda: bool(case.triton.unloads))
    assert case.triton.unloads == ["embeds-a"]
    assert case.backend.residents.budget.used() <= case.backend.residents.budget.total


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
def test_gateway_command_refuses_inconsistent_options(options: list[str], says: str, tmp_path: Path) -> None:
    from builder.commands import gateway

    options_given = gateway.parser().parse_args([option.format(here=tmp_path) for option in options])
    with pytest.raises(SpecError, match=says):
        gateway.run(options_given)


def test_serve_passes_its_options_to_the_gateway(tmp_path: Path) -> None:
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
