"""Several servers of one repository that change their version of a model: all of them, or none."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import pytest

from builder.cli import main
from builder.commands import promote
from builder.common.errors import ServeError
from builder.repository.versions import served_number
from builder.serving.server.control import Control
from tests.serving.published import two_versions

URLS = ("a:1", "b:1", "c:1")


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return two_versions(tmp_path / "model_repository", monkeypatch)


class FakeServers:
    """Servers by address, and the version that each answers with; None: it does not answer. `full` ones load none."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, repository: Path) -> None:
        self.numbers: dict[str, int | None] = dict.fromkeys(URLS, 2)
        self.full: set[str] = set()
        self.dying: set[str] = set()  # end while they load another version
        self.filling: set[str] = set()  # load one version, and are full then
        fakes = self

        def known(self: Control, model: str, states: Collection[str] = ("READY",)) -> set[int]:
            number = fakes.numbers[self.url]
            if number is None:
                raise ServeError(f"no Triton answers at {self.url}")
            return {number}

        def switch(self: Control, name: str) -> int:
            if self.url in fakes.dying:
                fakes.numbers[self.url] = None
            if self.url in fakes.full or fakes.numbers[self.url] is None:
                raise ServeError(f"{name} is not loaded by the server at {self.url}")
            fakes.numbers[self.url] = served_number(repository / name)
            fakes.full |= fakes.filling & {self.url}
            return fakes.numbers[self.url] or 0

        monkeypatch.setattr(Control, "versions", known)
        monkeypatch.setattr(Control, "switch", switch)


def roll_back(repository: Path) -> int:
    url = ["--url", ",".join(URLS[:2]), "--url", URLS[2]]
    return main(["rollback", "front", "--repository", str(repository), *url])


def test_rollback_changes_every_server(
    repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    servers = FakeServers(monkeypatch, repository)
    assert roll_back(repository) == 0
    assert set(servers.numbers.values()) == {1}
    said = " ".join(capsys.readouterr().err.split())
    assert f"and at {', '.join(URLS)}" in said


@pytest.mark.parametrize("trouble", ["full", "dying"])
def test_rollback_that_fails_on_one_server_changes_none(
    trouble: str, repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    servers = FakeServers(monkeypatch, repository)
    getattr(servers, trouble).add("b:1")
    assert roll_back(repository) != 0
    assert served_number(repository / "front") == 2
    assert (servers.numbers["a:1"], servers.numbers["c:1"]) == (2, 2)
    said = " ".join(capsys.readouterr().err.split())
    assert "front is not loaded by the server at b:1" in said
    assert "a:1 (version 2)" in said
    assert ("b:1 (does not answer)" in said) == (trouble == "dying")


@pytest.mark.parametrize("number", [None, 1, 7])
def test_servers_that_do_not_agree_at_first_are_left_alone(
    number: int | None, repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    servers = FakeServers(monkeypatch, repository)
    servers.numbers["c:1"] = number
    assert roll_back(repository) != 0
    assert servers.numbers == {"a:1": 2, "b:1": 2, "c:1": number}
    assert served_number(repository / "front") == 2
    assert "c:1" in capsys.readouterr().err


def test_promote_changes_every_server_or_none(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(promote, "_refusals", lambda *_: [])  # it passed its trial
    servers = FakeServers(monkeypatch, repository)
    servers.numbers = dict.fromkeys(URLS, 1)
    servers.full = {"c:1"}
    arguments = ["promote", "front", "--repository", str(repository), "--url", ",".join(URLS)]
    assert main(arguments) != 0
    assert set(servers.numbers.values()) == {1}
    assert served_number(repository / "front") == 1
    servers.full.clear()
    assert main([*arguments[:2], "2", *arguments[2:]]) == 0
    assert set(servers.numbers.values()) == {2}
    assert served_number(repository / "front") == 2


def test_failed_rollback_names_servers_that_do_not_go_back(
    repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Regression: the message said that the servers went back although one kept the other version."""
    servers = FakeServers(monkeypatch, repository)
    servers.filling.add("a:1")
    servers.full.add("b:1")
    assert roll_back(repository) != 0
    assert servers.numbers == {"a:1": 1, "b:1": 2, "c:1": 2}
    said = " ".join(capsys.readouterr().err.split())
    assert "a:1 did not go back to version 2: a:1 (version 1), b:1 (version 2)" in said


def test_rollback_to_an_absent_version_leaves_the_repository(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: the repository, which serves a version that is not promoted yet, went to that of the servers."""
    servers = FakeServers(monkeypatch, repository)
    servers.numbers = dict.fromkeys(URLS, 1)
    assert main(["rollback", "front", "7", "--repository", str(repository), "--url", ",".join(URLS)]) != 0
    assert served_number(repository / "front") == 2
    assert set(servers.numbers.values()) == {1}


def test_server_that_dies_after_the_trial_leaves_the_earlier_version(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the repository kept the version that was not promoted, and a restarted server loaded it."""
    servers = FakeServers(monkeypatch, repository)
    servers.numbers = dict.fromkeys(URLS, 1)

    def passed(*_: object) -> list[str]:
        servers.numbers["b:1"] = None
        return []

    monkeypatch.setattr(promote, "_refusals", passed)
    assert main(["promote", "front", "--repository", str(repository), "--url", ",".join(URLS)]) != 0
    assert served_number(repository / "front") == 1
    assert (servers.numbers["a:1"], servers.numbers["c:1"]) == (1, 1)
