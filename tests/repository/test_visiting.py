"""Temporary guest models in a repository are removed afterwards, and other commands ignore them."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from pathlib import Path

import pytest

from builder.common.errors import RepositoryError
from builder.repository.locks import locked
from builder.repository.transaction import changing, recover, visiting


def _made(entry: Path) -> None:
    entry.mkdir()
    (entry / "config.pbtxt").write_text("")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "model_repository"
    (folder / "front").mkdir(parents=True)
    return folder


def test_repository_can_change_while_a_guest_is_there(repository: Path) -> None:
    with visiting(repository, "front-candidate", _made):
        assert (repository / "front-candidate" / "config.pbtxt").is_file()
        with ThreadPoolExecutor(1) as other:
            assert other.submit(recover, repository).result(timeout=300) == [], "a guest of a process that lives stays"
            other.submit(_write, repository, "another").result(timeout=300)
        assert (repository / "front-candidate" / "config.pbtxt").is_file()
    assert [path.name for path in repository.iterdir()] == ["front"]
    assert [path.name for path in repository.parent.iterdir()] == ["model_repository"]


def _write(repository: Path, name: str) -> None:
    with changing(repository, name) as change:
        change.write(b"", repository / "front" / "label")
        change.undo()


def test_change_of_a_model_waits_for_its_lock(repository: Path) -> None:
    with ThreadPoolExecutor(1) as other:
        with locked(repository, "front"):
            changed = other.submit(_write, repository, "front")
            with pytest.raises(NotYet):
                changed.result(timeout=0.1)
        changed.result(timeout=300)


def test_guest_of_a_killed_process_is_removed(repository: Path) -> None:
    program = f"""
        import os
        from pathlib import Path
        from builder.repository.transaction import visiting
        from tests.repository.test_visiting import _made

        with visiting(Path({str(repository)!r}), "front-candidate", _made):
            os._exit(9)
    """
    killed = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], env={**os.environ}, check=False)
    assert killed.returncode == 9
    assert (repository / "front-candidate").is_dir()
    recover(repository)
    assert [path.name for path in repository.iterdir()] == ["front"]


def test_guest_takes_no_existing_name_and_leaves_nothing_on_failure(repository: Path) -> None:
    with pytest.raises(RepositoryError, match="has a model front of its own"), visiting(repository, "front", _made):
        pass

    def failing(entry: Path) -> None:
        _made(entry)
        raise OSError(28, "No space left on device")

    with pytest.raises(RepositoryError, match="Free some space"), visiting(repository, "guest", failing):
        pass
    assert [path.name for path in repository.iterdir()] == ["front"]
    assert [path.name for path in repository.parent.iterdir()] == ["model_repository"]
