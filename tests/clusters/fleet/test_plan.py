"""The plan of a fleet: which models are built, in which order and on how many cores."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from builder.building import pipeline
from builder.clusters.fleet import work
from builder.clusters.fleet.executor import BuildJob, BuildOutcome, BuildProgress
from builder.clusters.fleet.history import History, work_of
from builder.clusters.fleet.plan import FleetPlan, plan_builds
from builder.clusters.fleet.processes import ResourceClaim, fits
from builder.clusters.fleet.view import LineView, LiveView, plan_document, plan_line, summary
from builder.clusters.fleet.work import find_published, run_job
from builder.commands.build_many import run_jobs
from builder.common.progress import duration
from builder.options import BuildSpec, make_spec
from builder.repository.report.record import read_report
from tests.models import options_of

Make = Callable[..., BuildSpec]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BUILD_REPO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture
def make(small_repository: Path, checkpoint: Callable[[str], Path]) -> Make:
    """Return a function that specifies the model of `small_repository` with other options."""

    def spec(**options: Any) -> BuildSpec:
        built = {"model": str(checkpoint("topics")), "name": "topics", **options_of("topics")}
        return make_spec(**{**built, "output": small_repository, **options})

    return spec


def _plan(*specs: BuildSpec, rebuild: bool = False) -> FleetPlan:
    return plan_builds(specs, History(), rebuild)


def test_plan_gives_the_status_of_each_model(make: Make, tmp_path: Path) -> None:
    (broken := tmp_path / "broken").mkdir()
    plan = _plan(
        make(),
        make(keep=7),  # the destination does not change the build
        make(max_batch_size=8),
        make(name="other"),
        make(output=tmp_path / "elsewhere"),
        make(model=str(broken)),
        make(model="no-such/model"),
    )
    assert [model.status for model in plan.models] == [
        "unchanged",
        "unchanged",
        "changed",
        "new",
        "new",
        "changed",
        "refused",
    ]
    assert "no folder no-such/model here" in plan.models[-1].reason
    assert plan.models[0].report == read_report(make().output, "topics")
    assert [model.status for model in _plan(make(), rebuild=True).models] == ["changed"]
    assert plan_line(plan, 2, 10**10).startswith("7 models: 2 unchanged, 2 changed, 2 new, 1 refused; no similar build")


def test_plan_rebuilds_a_version_that_lacks_a_file(make: Make, tmp_path: Path) -> None:
    shutil.copytree(make().output, tmp_path / "copy")
    spec = make(output=tmp_path / "copy")
    assert [model.status for model in _plan(spec).models] == ["unchanged"]
    (tmp_path / "copy" / "topics" / "1" / "model.onnx").unlink()
    (model,) = _plan(spec).models
    assert model.status == "changed"
    assert model.reason.endswith("topics/1/model.onnx is missing")


@pytest.mark.parametrize("name", ["model.onnx", "tokenizer.json"])
def test_plan_rebuilds_a_version_with_a_damaged_file(make: Make, tmp_path: Path, name: str) -> None:
    """Regression: only missing files counted, so that `check` asked for a build which the next run left out."""
    shutil.copytree(make().output, tmp_path / "copy")
    damaged = tmp_path / "copy" / "topics" / "1" / name
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    (model,) = _plan(make(output=tmp_path / "copy")).models
    assert model.status == "changed"
    assert model.reason.endswith(f"topics/1/{name} is not the file that was built")


def test_plan_leaves_a_version_whose_configuration_was_edited(make: Make, tmp_path: Path) -> None:
    shutil.copytree(make().output, tmp_path / "copy")
    with (tmp_path / "copy" / "topics" / "config.pbtxt").open("a") as config:
        config.write("# reviewed\n")
    assert [model.status for model in _plan(make(output=tmp_path / "copy")).models] == ["unchanged"]


def test_worker_skips_a_build_published_by_another_run(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: overlapping runs built every model twice, and two equal versions replaced the two before."""
    monkeypatch.setattr(pipeline, "build", None)
    job = BuildJob(make(), 1, before=0)
    history, ended = History(), run_job(job, "worker 1")
    assert (ended.error, ended.report) == (None, read_report(job.spec.output, "topics"))
    console = Console(record=True, width=200)
    assert run_jobs([job], Said((ended,)), history, LineView(console, 1)) == [ended]
    assert "✓ topics: version 1, which was published meanwhile" in console.export_text()
    assert history.estimate(work_of(job.spec)).seconds is None, "nothing was measured"


def test_worker_waits_for_a_run_that_builds_the_same(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: two runs of one models.yaml, begun at once, built everything twice."""
    spec, waits, builds = make(output=tmp_path / "out"), Event(), 0

    def build(job: BuildJob, worker: str, on_progress: Callable[[BuildProgress], None]) -> BuildOutcome:
        nonlocal builds
        builds += 1
        assert waits.wait(60), "the second run waits for nothing"
        shutil.copytree(make().output / "topics", job.spec.output / "topics")
        return BuildOutcome(job.name, worker, 1.0, report=read_report(job.spec.output, "topics"))

    def note(progress: BuildProgress) -> None:
        if "another run" in progress.stage:
            waits.set()

    monkeypatch.setattr(work, "_run_build", build)
    monkeypatch.setattr(work, "load_libraries", lambda: None)
    with ThreadPoolExecutor(2) as runs:
        outcomes = list(runs.map(lambda worker: run_job(BuildJob(spec, 1), worker, note), ["worker 1", "worker 2"]))
    assert builds == 1
    assert [outcome.report for outcome in outcomes] == [read_report(spec.output, "topics")] * 2


def test_worker_builds_over_older_or_damaged_versions(make: Make, tmp_path: Path) -> None:
    assert find_published(BuildJob(make(), 1, before=1)) is None
    assert find_published(BuildJob(make(max_batch_size=8), 1)) is None
    shutil.copytree(make().output, tmp_path / "copy")
    (tmp_path / "copy" / "topics" / "1" / "build.json").write_text("{}")
    assert find_published(BuildJob(make(output=tmp_path / "copy"), 1)) is None
    assert [job.before for job in _plan(make(max_batch_size=8), make(name="other")).jobs(2, 2)] == [1, 0]


def test_worker_builds_if_the_published_version_is_unreadable(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: the worker ended without an outcome, and on Ray its task waited for one forever."""

    def stale(spec: BuildSpec) -> None:
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(work, "newest_report", stale)
    assert find_published(BuildJob(make(), 1)) is None


@dataclass(frozen=True)
class Said:
    """Executor that only records how builds ended."""

    outcomes: tuple[BuildOutcome, ...]

    def run(self, jobs: Sequence[BuildJob]) -> Generator[BuildProgress | BuildOutcome, None, None]:
        yield from self.outcomes


def _checkpoint(folder: Path, megabytes: int) -> str:
    folder.mkdir(exist_ok=True)
    with (folder / "model.safetensors").open("wb") as weights:
        weights.truncate(megabytes * 1_000_000)
    return str(folder)


@pytest.mark.parametrize(
    ("megabytes", "took"),
    [pytest.param(91, 1173, id="minilm"), pytest.param(498, 1512, id="gpt2"), pytest.param(861, 2796, id="llama-wide")],
)
def test_history_estimates_the_memory_of_a_first_build(megabytes: int, took: int, tmp_path: Path) -> None:
    """Peaks of `scripts/bench building`, in MB; a build that exceeds its estimate may get another one killed."""
    spec = make_spec(model=_checkpoint(tmp_path / "model", megabytes), output=tmp_path / "out")
    assert took <= History().estimate(work_of(spec)).memory / 1e6 <= 1.5 * took


def test_estimate_of_auto_adds_the_memory_of_both_engines(tmp_path: Path) -> None:
    """Both hold fp32 weights, twice the size of the checkpoint."""
    model, megabytes = _checkpoint(tmp_path / "model", 861), 861
    one, both = (
        History().estimate(work_of(make_spec(model=model, output=tmp_path / "out", engine=engine))).memory / 1e6
        for engine in ("onnxruntime", "auto")
    )
    assert both - one >= 2 * megabytes


def test_history_estimates_similar_builds(tmp_path: Path) -> None:
    specs = {
        name: make_spec(model=_checkpoint(tmp_path / name, megabytes), output=tmp_path / "out")
        for name, megabytes in {"first": 10, "alike": 12, "large": 90}.items()
    }
    history = History()
    assert history.estimate(work_of(specs["first"])).seconds is None
    history.record(work_of(specs["first"]), BuildOutcome("first", "worker 1", 4.0, 800_000_000))
    history.record(work_of(specs["first"]), BuildOutcome("first", "worker 1", 6.0, 900_000_000))
    again = History()
    assert again.estimate(work_of(specs["first"])).seconds == 6.0
    alike = again.estimate(work_of(specs["alike"]))
    assert (alike.seconds, alike.memory) == (5.0, 900_000_000)
    large = again.estimate(work_of(specs["large"]))
    assert large.seconds is None
    assert large.memory > 1_000_000_000
    other_kind = make_spec(model=specs["first"].model, precision="int8", output=tmp_path / "out")
    assert again.estimate(work_of(other_kind)).seconds is None
    plan = plan_builds(list(specs.values()), again)
    assert plan.seconds(1) == pytest.approx(6 + 5 + 5.5)
    assert plan.seconds(2) == pytest.approx((6 + 5 + 5.5) / 2)
    assert "about 8.2 s on 2 workers, 2.1 of 10.0 GB" in plan_line(plan, 2, 10**10)
    assert plan_document(plan, 2, 10**10)["models"][0]["seconds"] == 6.0


def test_history_ignores_a_damaged_file(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "builds.jsonl").write_text('{"name": 1}\n')
    assert History().own == {}


def test_history_skips_only_a_truncated_line(tmp_path: Path) -> None:
    """Regression: a truncated line lost all records."""
    work = work_of(make_spec(model=_checkpoint(tmp_path / "model", 10), output=tmp_path / "out"))
    History().record(work, BuildOutcome("model", "worker 1", 4.0, 800_000_000))
    file = tmp_path / "cache" / "builds.jsonl"
    file.write_text(file.read_text() + '{"name": "mod')
    assert History().estimate(work).seconds == 4.0
    History().record(work, BuildOutcome("model", "worker 1", 6.0, 800_000_000))
    History().record(work, BuildOutcome("model", "worker 1", 8.0, 800_000_000))
    assert History().estimate(work).seconds == 8.0


def test_plan_orders_builds_and_assigns_cores(tmp_path: Path) -> None:
    one, two = _checkpoint(tmp_path / "one", 1), _checkpoint(tmp_path / "two", 1)
    history = History()
    specs = [
        make_spec(model=one, name="a", output=tmp_path / "out"),
        make_spec(model=one, name="b", precision="int8", output=tmp_path / "out"),
        make_spec(model=one, name="timed", precision="auto", output=tmp_path / "out"),
        make_spec(model=two, name="c", precision="fp16", level="O3", output=tmp_path / "out"),
    ]
    history.record(work_of(specs[3]), BuildOutcome("c", "worker 1", 60.0, 10**9))
    history.record(work_of(specs[0]), BuildOutcome("a", "worker 1", 2.0, 10**9))
    plan = plan_builds(specs, history)
    jobs = plan.jobs(cores=8, workers=3)
    assert [(job.name, job.cores) for job in jobs] == [("c", 2), ("a", 2), ("b", 2), ("timed", 8)]


def test_fits_limits_memory_and_cores_unless_nothing_runs() -> None:
    there, busy, idle = ResourceClaim(4, 10), ResourceClaim(2, 5), ResourceClaim(0, 3)
    assert fits(ResourceClaim(2, 5), [busy], there)
    assert not fits(ResourceClaim(2, 6), [busy], there)
    assert not fits(ResourceClaim(3, 1), [busy], there)
    assert not fits(ResourceClaim(2, 3), [busy, idle], there)
    assert fits(ResourceClaim(9, 99), [idle], there)


def test_summary_names_failed_builds_with_their_reasons(make: Make) -> None:
    plan = _plan(make(), make(name="other"), make(model="no-such/model", name="absent"))
    *failed, numbers = summary(plan, [BuildOutcome("other", "worker 1", 3.0, 9 * 10**8, error="no good")], 75.4)
    assert failed[0].startswith("✗ absent: no folder no-such/model here")
    assert failed[1:] == ["✗ other: no good"]
    assert numbers == "0 built, 1 unchanged, 2 failed in 1 min 15 s; the largest build took 900 MB"
    assert (duration(3.21), duration(7800)) == ("3.2 s", "2 h 10 min")


def test_live_view_shows_a_line_per_worker_and_a_total(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builder.clusters.fleet.view.time", SimpleNamespace(monotonic=lambda: 0.0))
    plan = _plan(make(name="one"), make(name="two"), make(name="three"))
    console = Console(file=StringIO(), force_terminal=True, width=120)
    with LiveView(console, plan, 2) as shown:
        shown.show(BuildProgress("one", "worker 1", "export"))
        shown.show(BuildProgress("two", "worker 2", "loading torch"))
        assert _text(shown) == ["worker 1 one export 0 s", "worker 2 two loading torch 0 s", "0/3"]
        shown.show(BuildOutcome("two", "worker 2", 1.5, error="no good"))
        shown.show(BuildProgress("three", "worker 2", "resolve"))
        assert _text(shown) == ["worker 1 one export 0 s", "worker 2 three resolve 0 s", "1/3"]
    shown_text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "✗ two: no good" in shown_text
    assert "[bold]" not in shown_text, "Regression: names had literal markup whenever a build ended"


def test_live_view_estimates_after_two_builds_of_each_worker(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: the first estimate was 16 minutes for 2, because the first builds also load PyTorch."""
    now = 0.0
    monkeypatch.setattr("builder.clusters.fleet.view.time", SimpleNamespace(monotonic=lambda: now))
    names = [f"model {number}" for number in range(10)]
    plan = _plan(*(make(name=name.replace(" ", "_")) for name in names))
    seen = []
    with LiveView(Console(file=StringIO(), force_terminal=True, width=120), plan, 2) as shown:
        for number, model in enumerate(plan.builds):
            now += 30.0 if number < 2 else 1.0
            shown.show(BuildOutcome(model.name, f"worker {number % 2}", 1.5, error="no good"))
            seen.append(shown._remaining_seconds())
    assert seen == [None, None, None, *(pytest.approx(float(left)) for left in range(6, 0, -1)), None]


def _text(shown: LiveView) -> list[str]:
    """Return the lines of the live view; the progress bar is reduced to its count."""
    console = Console(width=120, record=True, file=StringIO())
    console.print(shown._render())
    lines = [" ".join(line.split()) for line in console.export_text().splitlines()]
    return [next((word for word in line.split() if "/" in word), line) for line in lines]
