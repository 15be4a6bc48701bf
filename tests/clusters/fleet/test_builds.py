"""`build-repo models.yaml` with a killed, a failed and a successful build, and the builds that remain."""

from __future__ import annotations

import json
import os
import posix
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from builder.cli import main
from builder.clusters.fleet.executor import BuildOutcome, BuildProgress
from builder.clusters.fleet.view import LineView
from builder.commands import build_many

# Workers are other processes: as conftest.py does for this one, let their cache keep stages however full the disk is.
ROOMY_DISK = "from builder.common.cache import entries\nentries.FREE_DISK_SHARE = 0.0\n"


class Killing(LineView):
    """View that kills the worker of the model `killed` during its build."""

    def show(self, message: BuildProgress | BuildOutcome) -> None:
        super().show(message)
        if isinstance(message, BuildProgress) and (message.name, message.stage) == ("killed", "export"):
            os.kill(_worker(os.getpid(), message.worker), signal.SIGKILL)


def _worker(parent: int, name: str) -> int:
    """Return the process id of a worker of `parent`."""
    (result,) = [
        int(path.parent.name)
        for path in Path("/proc").glob("[0-9]*/cmdline")
        if _text(path).split("\0")[-2:] == [name, ""] and f"PPid:\t{parent}\n" in _text(path.with_name("status"))
    ]
    return result


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


@dataclass(frozen=True)
class Ran:
    """Result of a run of `models`: its status, standard output and standard error, and its environment."""

    models: Path
    output: Path
    status: int
    document: Any
    printed: str
    environment: dict[str, str]


@pytest.fixture(scope="module")
def ran(checkpoint: Callable[[str], Path], module_folder: Callable[[str], Path]) -> Ran:
    """Build four models on one worker: one is killed, one cannot be built, one is good, and one does not exist."""
    folder, startup = module_folder("fleet"), module_folder("startup")
    (startup / "sitecustomize.py").write_text(ROOMY_DISK)
    (folder / "broken").mkdir()
    (folder / "broken" / "config.json").write_text("{}")
    output, models = folder / "model_repository", folder / "models.yaml"
    models.write_text(
        f"defaults: {{output: {output}, max_length: 64}}\nmodels:\n"
        f"  - {{model: {checkpoint('topics')}, name: killed}}\n  - {{model: {folder / 'broken'}}}\n"
        f"  - {{model: {checkpoint('topics')}, name: good}}\n  - {{model: no-such/absent}}\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BUILD_REPO_CACHE", str(folder / "cache"))
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("TMPDIR", str(folder))
        patch.setenv("PYTHONPATH", str(startup))
        patch.setattr(signal, "signal", lambda *_: None)
        patch.setattr(build_many, "LineView", Killing)
        written, printed = Console(record=True, width=500), []
        patch.setattr(build_many, "screen", written)
        patch.setattr("builtins.print", lambda text: printed.append(text))
        status = main([str(models), "--workers", "1", "--json"])
        return Ran(models, output, status, json.loads(printed[0]), written.export_text(), dict(os.environ))


def test_fleet_goes_on_after_a_killed_worker_and_failed_builds(ran: Ran) -> None:
    assert ran.status == 1
    (document,) = ran.document
    assert (document["name"], document["version"]) == ("good", 1)
    assert json.loads((ran.output / "good" / "build.json").read_text()) == document
    assert "[1/3] ✗ killed: its process was killed by SIGKILL in the stage 'export'; the machine may be" in ran.printed
    assert "[2/3] ✗ broken: " in ran.printed
    assert "[3/3] ✓ good: version 1 in " in ran.printed
    *_, absent, killed, broken, numbers = ran.printed.strip().splitlines()
    assert absent.startswith("✗ absent: no folder no-such/absent here")
    assert killed.startswith("✗ killed: its process was killed")
    assert broken.startswith("✗ broken: ")
    assert numbers.startswith("1 built, 0 unchanged, 3 failed in ")


def test_fleet_run_leaves_no_worker_and_no_temporary_file(ran: Ran) -> None:
    left = {path.name for path in ran.models.parent.iterdir()}
    assert left == {"broken", "cache", "model_repository", "models.yaml"}
    assert {path.name for path in ran.output.iterdir()} == {"good"}
    workers = [
        path for path in Path("/proc").glob("[0-9]*/cmdline") if "builder.clusters.fleet.processes" in _text(path)
    ]
    own = [path for path in workers if f"PPid:\t{os.getpid()}\n" in _text(path.with_name("status"))]
    assert own == []


@pytest.fixture
def later(ran: Ran, monkeypatch: pytest.MonkeyPatch) -> Ran:
    """Set the environment and cores of that run for later commands of this process."""
    for name in ("BUILD_REPO_CACHE", "HF_HUB_OFFLINE", "TMPDIR"):
        monkeypatch.setenv(name, ran.environment[name])
    monkeypatch.setattr(os, "sched_getaffinity", posix.sched_getaffinity)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    return ran


def test_dry_run_plans_the_remaining_builds(later: Ran, capfd: pytest.CaptureFixture[str]) -> None:
    assert main([str(later.models), "--dry-run", "--json"]) == 1  # one model cannot be built
    planned = capfd.readouterr()
    plan = json.loads(planned.out)
    assert {model["name"]: model["status"] for model in plan["models"]} == {
        "killed": "new",
        "broken": "new",
        "good": "unchanged",
        "absent": "refused",
    }
    (killed,) = [model for model in plan["models"] if model["name"] == "killed"]
    assert killed["kept"] == "select", "it differs from `good` in its name alone"
    assert killed["seconds"] > 0, "a model of its kind and size was built"
    assert killed["memory"] > 3e8
    assert "4 models: 2 new, 1 unchanged, 1 refused (1 with stages in the cache); about " in planned.err
    main([str(later.models), "--dry-run"])
    table = capfd.readouterr().out
    assert "killed" in table
    assert "good" not in table


def test_unchanged_model_is_not_built_again(
    later: Ran, checkpoint: Callable[[str], Path], capfd: pytest.CaptureFixture[str]
) -> None:
    report = json.loads((later.output / "good" / "build.json").read_text())
    assert (
        main([str(checkpoint("topics")), "--name", "good", "--max-length", "64", "-o", str(later.output), "--json"])
        == 0
    )
    again = capfd.readouterr()
    assert "nothing to do: version 1 of good is what this would build" in again.err
    assert json.loads(again.out) == report
    assert not (later.output / "good" / "2").exists()


def test_workers_exit_when_their_parent_is_killed(tmp_path: Path) -> None:
    """They remove their temporary files, and import the builder even if the working directory has such a package."""
    (tmp_path / "builder").mkdir()
    (tmp_path / "builder" / "__init__.py").write_text("raise ImportError('not the builder')")
    program = (
        "import time\nfrom builder.clusters.fleet.processes import Worker\nworker = Worker('orphan', False)\n"
        "worker._start()\nprint(worker.process.pid, flush=True)\ntime.sleep(60)"
    )
    command = [sys.executable, "-P", "-c", program]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path, env=environment) as parent:
        assert parent.stdout is not None
        worker = Path("/proc", parent.stdout.readline().strip())
        time.sleep(1.5)
        assert _text(worker / "cmdline"), "it ended by itself"
        parent.kill()
    end = time.monotonic() + 300  # the worker checks its parent only after its imports
    while _text(worker / "cmdline") and time.monotonic() < end:
        time.sleep(0.05)
    assert not _text(worker / "cmdline")
    assert [path.name for path in tmp_path.iterdir()] == ["builder"]


@pytest.mark.parametrize("value", ["0", "many", "-1"])
def test_workers_option_refuses_invalid_numbers(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["org/model", "--workers", value])
    assert "argument --workers" in capsys.readouterr().err
