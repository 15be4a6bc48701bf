"""Plans for several pods, which share the requests or divide the models."""

from __future__ import annotations

from pathlib import Path

import pytest

from builder.cli import main
from builder.options import Capacity, Load, load_specs
from builder.serving.plan import machine
from builder.serving.plan.lines import SERVER, ModelPlan
from builder.serving.plan.pods import Pod, PodSize, divide_models, pods_needed

GB = 1_000_000_000
PLANS = [
    ModelPlan(name, (), {}, size * GB, 50 << 20, cores)
    for name, size, cores in (("a", 1, 0.5), ("b", 5, 1.0), ("c", 3, 3.0))
]
TEXT = """
defaults: {machine: {cores: 4, memory_gb: MEMORY, shm_mb: 256}}
models:
  - {model: org/a, name: a, load: {requests_per_s: 60}}
  - {model: org/b, name: b, load: {requests_per_s: 6}}
  - {model: org/c, name: c, load: {requests_per_s: 3}}
"""


def test_load_is_shared_between_pods() -> None:
    assert Load(requests_per_s=60, tokens=8).shared_by(3) == Load(requests_per_s=20, tokens=8)


def test_pods_take_the_largest_models_first() -> None:
    size = PodSize(cores=4, memory=7 * GB)
    filled, left = divide_models(PLANS, 2, size)
    assert [[plan.name for plan in pod.plans] for pod in filled] == [["b", "a"], ["c"]]
    assert left == ()
    assert filled[0].memory == SERVER + 6 * GB
    assert filled[0].cores == 1.5
    assert pods_needed(PLANS, size) == 2
    by_cores, _ = divide_models(PLANS, 2, PodSize(cores=3.2, memory=20 * GB))
    assert [[plan.name for plan in pod.plans] for pod in by_cores] == [["b", "a"], ["c"]]
    large = [ModelPlan(name, (), {}, GB, 200 << 20) for name in "xy"]
    assert pods_needed(large, PodSize(4, 20 * GB, 256 << 20)) == 2, "400 MiB of /dev/shm"
    assert pods_needed(large, PodSize(4, 20 * GB)) == 1


def test_divide_models_returns_models_that_fit_no_pod() -> None:
    filled, left = divide_models(PLANS, 1, PodSize(4, 4 * GB))
    assert [plan.name for plan in left] == ["b", "a"]
    assert [plan.name for plan in filled[0].plans] == ["c"]
    assert pods_needed(PLANS, PodSize(4, 4 * GB)) is None
    assert Pod().fits(PodSize(0, SERVER))


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace planning by the plans above, scaled to the requested rate."""
    rates = {"a": 60.0, "b": 6.0, "c": 3.0}

    def plan_of(capacity: Capacity, load: Load, needs: None) -> ModelPlan:
        (one,) = [plan for plan in PLANS if plan.name == capacity.name]
        share = load.requests_per_s / rates[one.name]
        return ModelPlan(one.name, (), {}, one.memory, one.shm, (one.cores or 0) * share)

    monkeypatch.setattr(machine, "needs_of", lambda spec: None)
    monkeypatch.setattr(machine, "_plan", plan_of)


@pytest.mark.usefixtures("planned")
@pytest.mark.parametrize(
    ("memory", "pods", "status", "expected"),
    [
        ("10", "1", 1, "the models keep 4.5 cores busy and the machine has 4"),
        ("10", "2", 0, "2 pods, with all models and 1/2 of the requests each each 9,125 MB 256 MiB 2.25 a, b, c"),
        ("7", "2", 1, "1 6,125 MB 256 MiB 1.5 b, a 2 3,125 MB 256 MiB 3 c"),
        ("5.5", "2", 1, "1 5,125 MB 256 MiB 1 b 2 4,125 MB 256 MiB 3.5 c, a"),
        ("4", "2", 1, "no room for b: a larger pod is needed"),
    ],
)
def test_plan_command_prints_the_contents_of_pods(
    memory: str, pods: str, status: int, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "models.yaml"
    file.write_text(TEXT.replace("MEMORY", memory))
    assert len(load_specs(file)) == 3
    assert main(["plan", str(file), "--pods", pods]) == status
    output = capsys.readouterr()
    shown = " ".join("".join(c if c.isascii() else " " for c in output.out + output.err).split())
    assert expected in shown.replace("pod memory /dev/shm busy cores models ", "")
