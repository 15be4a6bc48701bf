"""A disk that is full, whoever finds it so and however: one line, and nothing left behind."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from builder import pipeline
from builder.cli import main
from builder.errors import ExportError, RepositoryError
from builder.workplace import PREFIX, workplace

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
def test_a_full_disk_is_one_line_with_what_to_do(write: Callable[[], None]) -> None:
    full = r"(No space left on device|Disk quota exceeded).*TMPDIR"
    with pytest.raises(RepositoryError, match=full) as refusal, workplace() as folder:
        write()
    assert "\n" not in str(refusal.value)
    assert not folder.exists()


def test_a_disk_without_room_for_a_folder_is_one_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """tempfile tries to write in each place, and then says that there is none."""
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: [str(tmp_path / "absent")])
    with pytest.raises(RepositoryError, match=r"No usable temporary directory .* TMPDIR"), workplace():
        pass


@pytest.mark.parametrize("error", [ExportError("no graph"), RepositoryError("its own disk: No space left"), KeyError()])
def test_other_errors_are_themselves(error: Exception) -> None:
    with pytest.raises(type(error)) as raised, workplace():
        raise error
    assert raised.value is error


def test_what_a_killed_build_left_is_taken_away_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    places = {name: tmp_path / name for name in (f"{PREFIX}left", f"{PREFIX}fresh", "build-repo-another")}
    for name, place in places.items():
        (place / "graphs").mkdir(parents=True)
        (place / "graphs" / "model.onnx").write_bytes(b"a graph")
        if not name.endswith("fresh"):
            os.utime(place, (0, 0))
    with workplace() as running:
        os.utime(running, (0, 0))
        assert {path.name for path in tmp_path.iterdir()} == {*places, running.name} - {f"{PREFIX}left"}
        with workplace():
            assert running.is_dir(), "its build runs"
    assert {path.name for path in tmp_path.iterdir()} == {*places} - {f"{PREFIX}left"}


def test_a_build_says_it(
    checkpoint: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def full(spec: object) -> None:
        _python()

    monkeypatch.setattr(pipeline, "resolve", full)
    assert main([str(checkpoint("topics")), "--output", str(tmp_path / "repository")]) == 1
    said = " ".join(capsys.readouterr().err.split())
    assert "No space left on device" in said
    assert "Free some space" in said
    assert "Traceback" not in said
