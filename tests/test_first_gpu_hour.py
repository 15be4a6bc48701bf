"""`scripts/first-gpu-hour`: steps that end in time, results that are written as they come, and a rehearsal of each."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

from scripts.first_gpu_hour import PYTEST, ROOT, STEPS, Step, run_steps


def python(name: str, code: str, minutes: float = 1) -> Step:
    return Step(name, minutes, (sys.executable, "-c", code), (sys.executable, "-c", "print('rehearsed')"))


def status(folder: Path, name: str) -> str:
    return str(json.loads((folder / f"{name}.json").read_text())["status"])


def test_first_hour_goes_on_after_steps_that_fail_or_hang(tmp_path: Path) -> None:
    hangs = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])"
    steps = [
        python("hangs", hangs, minutes=0.02),
        python("fails", "print('why'); raise SystemExit(3)"),
        Step("absent", 1, ("no-such-command",), ()),
        python("passes", "print('fine')"),
    ]
    begin = time.monotonic()
    assert run_steps(steps, tmp_path, dry_run=False) == 1
    assert time.monotonic() - begin < 30, "the process that a step started is ended with it"
    found = {step.name: status(tmp_path, step.name) for step in steps}
    assert found == {"hangs": "timed out", "fails": "failed", "absent": "missing", "passes": "passed"}
    assert "why" in json.loads((tmp_path / "fails.json").read_text())["output"]


def test_first_hour_does_not_wait_for_processes_of_their_own(tmp_path: Path) -> None:
    """Regression: a server that a step left behind held its output open, and the hour waited for it."""
    leaves = (
        "import subprocess, sys; print('left', flush=True); "
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(20)'], start_new_session=True)"
    )
    hangs = f"{leaves}; import time; time.sleep(20)"
    begin = time.monotonic()
    assert run_steps([python("leaves", leaves), python("hangs", hangs, 0.05)], tmp_path, dry_run=False) == 1
    assert time.monotonic() - begin < 15
    assert (status(tmp_path, "leaves"), status(tmp_path, "hangs")) == ("passed", "timed out")
    assert "left" in json.loads((tmp_path / "hangs.json").read_text())["output"]


def test_first_hour_lets_a_step_end_what_it_started(tmp_path: Path) -> None:
    """Regression: containers of a step that took too long kept the GPU."""
    ended = tmp_path / "ended"
    step = Step("compose", 0.02, ("sh", "-ec", f"trap 'touch {ended}' EXIT TERM; sleep 20"), ())
    assert run_steps([step], tmp_path / "results", dry_run=False) == 1
    assert ended.exists()


def test_first_hour_runs_what_was_only_rehearsed(tmp_path: Path) -> None:
    """Regression: results of --dry-run passed for those of the GPU."""
    steps = [python("step", "raise SystemExit(1)")]
    assert run_steps(steps, tmp_path, dry_run=True) == 0
    assert run_steps(steps, tmp_path, dry_run=False) == 1


def test_first_hour_goes_on_where_it_stopped(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    steps = [python("counts", f"open({str(marker)!r}, 'a').write('x')")]
    assert run_steps(steps, tmp_path / "results", dry_run=False) == 0
    assert run_steps([*steps, python("next", "pass")], tmp_path / "results", dry_run=False) == 0
    assert marker.read_text() == "x"
    assert status(tmp_path / "results", "next") == "passed"


def test_first_hour_rehearses_instead_of_running(tmp_path: Path) -> None:
    assert run_steps([python("step", "raise SystemExit(1)")], tmp_path, dry_run=True) == 0
    assert "rehearsed" in json.loads((tmp_path / "step.json").read_text())["output"]


def test_first_hour_fits_into_an_hour_and_its_tests_exist() -> None:
    assert sum(step.minutes for step in STEPS) <= 60
    assert len({step.name for step in STEPS}) == len(STEPS)
    commands = [command for step in STEPS for command in (step.command, step.rehearsal) if command[2:3] == ("pytest",)]
    assert len(commands) > len(STEPS)
    for command in commands:
        path, words = ROOT / command[len(PYTEST)], command[len(PYTEST) + 2 :]
        for word in " ".join(words).replace(" and ", " ").split():
            assert word in path.read_text(), f"{path.name} has no test of {word}"


def test_first_hour_script_prints_its_help() -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "scripts.first_gpu_hour", "--help"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "--dry-run" in shown.stdout
