"""The repository after a server failed to switch to another version."""

from __future__ import annotations

import argparse
import errno
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

from builder.cli import main
from builder.commands import promote
from builder.common.errors import ServeError
from builder.repository.versions import served_number
from builder.serving.promotion import promote as trials
from builder.serving.promotion.promote import PromotionTrial, TriedVersion
from builder.serving.server.control import Control
from tests.repository.test_publish import _publish
from tests.serving.published import two_versions

STILL = "version 2 of front_model still has requests after 600 s"
Versions = dict[str, set[int]]


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return two_versions(tmp_path / "model_repository", monkeypatch)


def _server(
    monkeypatch: pytest.MonkeyPatch, after: Versions | None, error: BaseException, before: Versions | None
) -> None:
    """Patch `Control` with a server that fails to switch with `error`.

    `before` and `after` map the states of its versions to their numbers; None: it does not answer.
    """
    now: list[Versions | None] = [before]

    def known(self: Control, model: str, states: Collection[str] = ("READY",)) -> set[int]:
        if now[0] is None:
            raise ServeError("no Triton answers")
        return {number for state in states for number in now[0].get(state, set())}

    def switch(self: Control, name: str) -> int:
        now[0] = after
        raise error

    monkeypatch.setattr(Control, "versions", known)
    monkeypatch.setattr(Control, "switch", switch)


@pytest.mark.parametrize(
    ("after", "error", "says"),
    [
        ({"READY": {2}}, ServeError("front is not loaded"), 2),
        ({"READY": {1}}, ServeError(STILL), 1),
        (None, ServeError("no Triton answers"), 2),
        ({"READY": {2}}, KeyboardInterrupt(), 2),
        ({"READY": {2}, "LOADING": {1}}, KeyboardInterrupt(), 1),
    ],
)
def test_failed_rollback_leaves_server_and_repository_in_agreement(
    after: Versions | None, error: BaseException, says: int, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the server did switch, and only earlier requests did not finish, the files stay switched too.

    With the old files, the next start would serve a version that is not served now.
    """
    _server(monkeypatch, after, error, before={"READY": {2}})
    assert main(["rollback", "front", "--repository", str(repository), "--url", "127.0.0.1:1"]) != 0
    assert served_number(repository / "front") == says


@pytest.mark.parametrize(
    ("has", "error"), [({"READY": {1}}, ServeError("the server does not read it")), (None, ServeError("never asked"))]
)
def test_server_of_another_repository_does_not_roll_this_one_back(
    has: Versions | None, error: ServeError, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server serves another version than this repository; one that does not answer is ignored too."""
    _publish(repository, b"three")
    _server(monkeypatch, has, error, before=has)
    assert main(["rollback", "front", "--repository", str(repository), "--url", "127.0.0.1:1"]) != 0
    assert served_number(repository / "front") == 3


@pytest.mark.parametrize(
    ("after", "error", "says"),
    [
        ({"READY": {1}}, ServeError("front is not loaded"), 1),
        ({"READY": {2}}, ServeError(STILL), 2),
        (None, ServeError("no Triton answers"), 1),
        ({"READY": {1}}, KeyboardInterrupt(), 1),
    ],
)
def test_failed_promotion_leaves_server_and_repository_in_agreement(
    after: Versions | None, error: BaseException, says: int, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A version passed its trial, and a restarted Triton would serve it."""

    def passed(options: argparse.Namespace, *_: object) -> list[str]:
        return []

    monkeypatch.setattr(promote, "_refusals", passed)
    _server(monkeypatch, after, error, before={"READY": {1}})
    assert main(["promote", "front", "--repository", str(repository), "--url", "127.0.0.1:1"]) != 0
    assert served_number(repository / "front") == says


def test_promote_reports_a_read_only_repository_in_one_line(
    repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The trial of a version locks its model with a file."""
    real = os.open

    def read_only(path: str | Path, *rest: Any, **more: Any) -> int:
        if str(path).endswith("lock"):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return real(path, *rest, **more)

    _server(monkeypatch, None, ServeError("it was never asked"), before={"READY": {1}})
    where = ["--repository", str(repository), "--url", "127.0.0.1:1"]
    assert main(["rollback", "front", "1", *where[:2]]) == 0
    monkeypatch.setattr(os, "open", read_only)
    assert main(["promote", "front", "2", *where]) == 1
    said = " ".join(capsys.readouterr().err.split())
    assert f"{repository.parent} could not be written (Read-only file system): nothing was changed. Let this" in said
    assert "Let this user write to it and to the folder that it is in" in said


def test_promote_reports_a_refused_candidate_that_stays_loaded(
    repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Regression: after 600 s, only the failed unloading was reported, not the reason for the refusal."""

    def stays(self: Control, model: str, patience_s: float) -> None:
        raise ServeError(f"version 2 of {model} still has requests after {patience_s:g} s")

    def failed(*_: object) -> PromotionTrial:
        return PromotionTrial(TriedVersion(1, [1.0]), TriedVersion(2, [], ["front: no memory"]), [])

    _server(monkeypatch, None, ServeError("it was never asked"), before={"READY": {1}})
    monkeypatch.setattr(Control, "load", lambda *_: None)
    monkeypatch.setattr(Control, "unload", stays)
    monkeypatch.setattr(trials, "compare", failed)
    assert main(["promote", "front", "2", "--repository", str(repository), "--url", "127.0.0.1:1"]) == 1
    said = " ".join(capsys.readouterr().err.split())
    assert "1 requests failed: front: no memory" in said
    assert "version 2 of front-candidate still has requests after 60 s" in said
    assert served_number(repository / "front") == 1
