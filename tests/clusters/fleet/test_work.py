"""Process settings of a build: how long its threads spin, and how often it collects garbage."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from builder.building import pipeline
from builder.cli import main
from builder.clusters.fleet import work
from builder.clusters.fleet.history import History, work_of
from builder.clusters.fleet.work import GC_THRESHOLDS, GOMP_SPINCOUNT, collecting_garbage_rarely, load_libraries
from builder.commands import build_one, downloads
from builder.commands.downloads import LoadingLine
from builder.common.errors import SpecError
from builder.options import make_spec

LOADS = """
import ctypes, sys
from builder.clusters.fleet.work import limit_spinning
limit_spinning()
ctypes.CDLL(sys.argv[1])
"""


@pytest.mark.parametrize(("stated", "expected"), [(None, GOMP_SPINCOUNT), ("77", "77")])
def test_torch_threads_spin_briefly_unless_the_user_set_it(stated: str | None, expected: str) -> None:
    """GNU OpenMP reads the setting when it is loaded, and reports it."""
    packages = Path(torch.__file__).parent.parent
    library = next(file for folder in ("torch/lib", "torch.libs") for file in packages.glob(f"{folder}/libgomp*"))
    around = {name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"}
    around |= {"OMP_DISPLAY_ENV": "verbose"} | ({} if stated is None else {"GOMP_SPINCOUNT": stated})
    done = subprocess.run(
        [sys.executable, "-c", LOADS, str(library)], env=around, capture_output=True, text=True, check=True
    )
    assert f"GOMP_SPINCOUNT = '{expected}'" in done.stderr


def test_collecting_garbage_rarely_restores_the_thresholds() -> None:
    before = gc.get_threshold()
    with collecting_garbage_rarely():
        assert gc.get_threshold() == GC_THRESHOLDS
    assert gc.get_threshold() == before


def test_single_build_has_the_process_settings_of_a_worker(
    checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: only workers and the benchmark had these settings, and GPT-2 took 1.5 times as long."""
    found: list[object] = []

    def build(*_: object) -> None:
        found.extend([gc.get_threshold(), os.environ.get("GOMP_SPINCOUNT")])
        raise SpecError("that is all")

    monkeypatch.setattr(pipeline, "build", build)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setenv("GOMP_SPINCOUNT", "")  # so that monkeypatch restores it
    monkeypatch.delenv("GOMP_SPINCOUNT")
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    try:
        assert main([str(checkpoint("topics")), "--name", "topics", "--output", str(tmp_path)]) == 1
    finally:
        gc.set_threshold(*before)
    assert found == [GC_THRESHOLDS, GOMP_SPINCOUNT]


def test_single_build_records_its_time(
    checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second build knows from it how long it takes."""
    monkeypatch.setenv("BUILD_REPO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    model, output = str(checkpoint("topics")), tmp_path / "repository"
    assert main([model, "--name", "topics", "--output", str(output), "--json"]) == 0
    expected = History().estimate(work_of(make_spec(model=model, name="topics", output=output))).seconds
    assert expected is not None
    assert expected > 0


def test_stage_says_what_is_left_of_a_build_of_known_length(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 10.0
    monkeypatch.setattr(build_one, "time", SimpleNamespace(perf_counter=lambda: now))
    known, unknown = (build_one.Stages(expected) for expected in (90.0, None))
    assert known.title("export") == "export, about 1 min 30 s of the build left"
    assert unknown.title("export") == "export"
    now += 100
    assert known.title("export") == "export", "it takes longer than expected"


def test_loading_line_says_what_is_left_of_a_download(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count the speed from the first report: what an earlier download left here is no part of it."""
    now = 10.0
    monkeypatch.setattr(downloads, "time", SimpleNamespace(perf_counter=lambda: now))
    line = LoadingLine(lambda: "resolve")
    assert line.__rich__() == "resolve"
    line.report(400e6, 1e9)
    assert line.__rich__() == "downloading, 400.0 MB of 1.0 GB"
    now += 10
    line.report(500e6, 1e9)
    assert line.__rich__() == "downloading, 500.0 MB of 1.0 GB, about 50.0 s left"
    line.report(1e9, 1e9)
    assert line.__rich__() == "resolve"
    line.report(1e6, 5e6)
    now += 1
    line.report(2e6, 5e6)
    assert line.__rich__() == "downloading, 2.0 MB of 5.0 MB, about 3.0 s left"
    now += 100
    line.report(10e6, 1e9)
    assert line.__rich__() == "downloading, 10.0 MB of 1.0 GB", "a larger download after a small one has its own speed"


def test_load_libraries_freezes_them_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a_story.py").write_text("import gc\nlooked = gc.isenabled()\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(work, "PIPELINE", "a_story")
    try:
        load_libraries()
        assert not sys.modules["a_story"].looked
        assert gc.isenabled()
        assert gc.get_freeze_count() > 0
        gc.unfreeze()
        load_libraries()
        assert gc.get_freeze_count() == 0, "what a second build made may be garbage"
    finally:
        gc.unfreeze()
        sys.modules.pop("a_story", None)
