"""A full disk is reported in one line, and the build leaves no files."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from builder.building import pipeline
from builder.checkpoints import fetch as fetch_module
from builder.checkpoints.resolve import resolve
from builder.cli import main
from builder.common.errors import ExportError, RepositoryError
from builder.common.workplace import PREFIX, build_folder, temporary_folder
from builder.engines.optimise.fusion import fuse
from builder.graphs.export import encoder
from builder.options import make_spec
from builder.repository.locks import refuse_unwritable
from tests.models import options_of

FULL_DEVICE = Path("/dev/full")  # on which every write fails as on a full disk


def _python() -> None:
    FULL_DEVICE.write_bytes(b"a graph")


def _native() -> None:
    raise RuntimeError("[ONNXRuntimeError] : 1 : FAIL : write failed:\nNo space left on device")


def _of_a_quota() -> None:
    raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))


def _in_an_export() -> None:
    try:
        _python()
    except OSError as error:
        raise ExportError("the graph could not be written") from error


@pytest.mark.parametrize("write", [_python, _native, _of_a_quota, _in_an_export])
def test_full_disk_is_reported_in_one_line_with_the_remedy(write: Callable[[], None]) -> None:
    full = r"(No space left on device|Disk quota exceeded).*TMPDIR"
    with pytest.raises(RepositoryError, match=full) as refusal, build_folder() as folder:
        write()
    assert "\n" not in str(refusal.value)
    assert not folder.exists()


def test_disk_without_space_for_a_folder_is_reported_as_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The module tempfile tries each candidate folder and then raises FileNotFoundError."""
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: [str(tmp_path / "absent")])
    with pytest.raises(RepositoryError, match=r"No usable temporary directory .* TMPDIR"), build_folder():
        pass


@pytest.mark.parametrize("error", [ExportError("no graph"), RepositoryError("its own disk: No space left"), KeyError()])
def test_build_folder_passes_other_errors_through(error: Exception) -> None:
    with pytest.raises(type(error)) as raised, build_folder():
        raise error
    assert raised.value is error


def test_build_folder_names_another_full_disk(tmp_path: Path) -> None:
    with pytest.raises(RepositoryError) as refusal, build_folder():
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(tmp_path / "kept"))
    assert str(tmp_path / "kept") in str(refusal.value)
    assert "TMPDIR" not in str(refusal.value)


def test_build_folder_names_a_full_hub_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot(*_: object, **__: object) -> str:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(fetch_module, "snapshot_download", snapshot)
    with (
        pytest.raises(RepositoryError, match=r"has no room in the cache of the Hub, .*HF_HOME") as refusal,
        build_folder(),
    ):
        fetch_module.fetch("org/writer", None, weights=True)
    assert "TMPDIR" not in str(refusal.value)


def test_build_folder_reports_full_disk_of_a_version_for_a_store() -> None:
    """The message must not name the folder, because the user chose a store."""

    def lay_out(folder: Path) -> None:
        try:
            _python()
        except OSError as error:
            raise RepositoryError(f"{folder} could not be written (No space left on device). Choose another") from error

    with pytest.raises(RepositoryError, match=r"No space left on device.*TMPDIR") as refusal, build_folder() as folder:
        lay_out(folder / "version_1")
    assert "version_1" not in str(refusal.value)


def test_full_disk_is_not_reported_as_a_defect_of_the_graph(
    checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the unfused graph, which may fit, would be published as if the model could not be fused."""
    tried = []

    def write(*_: object) -> None:
        tried.append(1)
        _python()

    monkeypatch.setattr(encoder, "export_module", write)
    with pytest.raises(OSError, match="No space left on device"):
        encoder.export(resolve(make_spec(model=str(checkpoint("topics")))), tmp_path)
    assert tried == [1]


class Disk(NamedTuple):
    total: int
    used: int
    free: int


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list whose last value every query of the free disk space gets."""
    free = [1 << 60]
    monkeypatch.setattr("builder.common.workplace.shutil.disk_usage", lambda place: Disk(1 << 60, 0, free[-1]))
    return free


@pytest.mark.parametrize("model", ["topics", "writes", "sums"])
def test_build_refuses_a_disk_too_small_for_its_graphs(
    model: str, free: list[int], checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names the size of the graphs and the folder."""
    monkeypatch.setenv("BUILD_REPO_CACHE", str(tmp_path / "cache"))
    spec = make_spec(model=str(checkpoint(model)), name="m", output=tmp_path / "repository", **options_of(model))
    free.append(2 * (checkpoint(model) / "model.safetensors").stat().st_size // 3)
    stages: list[str] = []
    with pytest.raises(RepositoryError, match=r"take about 0\.0 GB, and 0\.0 GB are free in .*set TMPDIR"):
        pipeline.build(spec, lambda name: _noting(name, stages))
    assert stages[-1] == "export"
    assert not (tmp_path / "repository").exists()


def test_build_names_a_disk_that_filled_after_the_export(
    free: list[int], checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """ONNX Runtime reports a full disk as a protobuf that could not be serialised."""
    exported = encoder.export(resolve(make_spec(model=str(checkpoint("topics")))), tmp_path).graph
    free.append(exported.size - 1)
    with pytest.raises(RepositoryError, match=r"model\.onnx, fused, take about"):
        fuse(exported, tmp_path)
    free.append(exported.size)
    assert fuse(exported, tmp_path).operators


def test_build_needs_no_space_for_cached_stages(
    free: list[int], checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BUILD_REPO_CACHE", str(tmp_path / "cache"))
    spec = make_spec(model=str(checkpoint("topics")), name="m", max_length=64, output=tmp_path / "repository")
    pipeline.build(spec)
    free.append(0)
    assert "select" in pipeline.build(spec).kept


@contextmanager
def _noting(name: str, stages: list[str]) -> Iterator[None]:
    stages.append(name)
    yield


def test_build_folder_removes_only_folders_of_killed_builds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    places = {name: tmp_path / name for name in (f"{PREFIX}left", f"{PREFIX}fresh", "build-repo-another")}
    for name, folder in places.items():
        (folder / "graphs").mkdir(parents=True)
        (folder / "graphs" / "model.onnx").write_bytes(b"a graph")
        if not name.endswith("fresh"):
            os.utime(folder, (0, 0))
    with build_folder() as running:
        os.utime(running, (0, 0))
        assert {path.name for path in tmp_path.iterdir()} == {*places, running.name} - {f"{PREFIX}left"}
        with build_folder():
            assert running.is_dir(), "its build runs"
    assert {path.name for path in tmp_path.iterdir()} == {*places} - {f"{PREFIX}left"}


def test_build_folder_removes_the_copied_folder_of_a_killed_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A build killed for exceeding memory left a whole fp32 checkpoint."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with temporary_folder() as running:
        os.utime(running, (0, 0))
        with build_folder():
            assert running.is_dir()
        left = shutil.copytree(running, tmp_path / f"{PREFIX}left")
        os.utime(left, (0, 0))
        with build_folder():
            assert not left.exists()


def test_build_folder_opens_no_pipe_of_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: every build and server waited for a writer of a pipe with the name of an abandoned folder."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    pipe = tmp_path / f"{PREFIX}pipe"
    os.mkfifo(pipe)
    os.utime(pipe, (0, 0))
    with build_folder() as folder:
        assert folder.is_dir()


def test_build_reports_a_full_disk(
    checkpoint: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def full(spec: object) -> None:
        _python()

    monkeypatch.setattr(pipeline, "resolve", full)
    assert main([str(checkpoint("topics")), "--output", str(tmp_path / "repository")]) == 1
    output = " ".join(capsys.readouterr().err.split())
    assert "No space left on device" in output
    assert "Free some space" in output
    assert "Traceback" not in output


@pytest.mark.parametrize("output", ["file", "file/repository", "file/a/b", "dangling", "/proc/repository", "/proc/a/b"])
def test_unwritable_output_is_refused_before_the_build(output: str, tmp_path: Path) -> None:
    """Regression: the output folder was created only at the end of a build."""
    (tmp_path / "file").write_text("in its place")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    spec = make_spec(model=str(tmp_path), name="m", output=tmp_path / output)

    def fail_at_stage(name: str) -> AbstractContextManager[None]:
        raise AssertionError(f"the stage {name} began")

    with pytest.raises(RepositoryError, match=f"{output} could not be written"):
        pipeline.build(spec, fail_at_stage)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dangling", "file"]


def test_trial_of_the_output_leaves_no_files(tmp_path: Path) -> None:
    existing = tmp_path / "repository"
    existing.mkdir()
    for output in (existing, tmp_path / "new", tmp_path / "a" / "b" / "c"):
        refuse_unwritable(output)
    assert [path.name for path in tmp_path.rglob("*")] == ["repository"]
