"""Name the command that installs an extra, by the tool that made the environment."""

from __future__ import annotations

import sys
from importlib import metadata, util
from pathlib import Path
from types import SimpleNamespace

import pytest

from builder.common.distribution import DISTRIBUTION, installing, installing_here

WHEEL = '{"url": "file:///home/ada/a%20wheel.whl", "archive_info": {}}'
ADDRESS = '{"url": "https://example.org/a.whl", "archive_info": {}}'
COMMIT = '{"url": "https://example.org/a.git", "vcs_info": {"vcs": "git", "commit_id": "0a1b"}}'
EDITABLE = '{"url": "file:///home/ada/sources", "dir_info": {"editable": true}}'


@pytest.mark.parametrize(
    ("folder", "files", "has_pip", "origin", "command"),
    [
        ("venv", [], True, None, f"pip install '{DISTRIBUTION}[sign]'"),
        ("venv", [], False, WHEEL, f"uv pip install '{DISTRIBUTION}[sign]'"),
        ("archive-v0/a1b2", [], False, None, f"uvx --from '{DISTRIBUTION}[sign]' build-repo"),
        ("archive-v0/a1b2", [], False, WHEEL, "uvx --from '/home/ada/a wheel.whl[sign]' build-repo"),
        (
            "archive-v0/a1b2",
            [],
            False,
            ADDRESS,
            f"uvx --from '{DISTRIBUTION}[sign] @ https://example.org/a.whl' build-repo",
        ),
        (
            "tools/name",
            ["uv-receipt.toml"],
            False,
            COMMIT,
            f"uv tool install '{DISTRIBUTION}[sign] @ git+https://example.org/a.git@0a1b'",
        ),
        ("tools/name", ["uv-receipt.toml"], False, WHEEL, "uv tool install '/home/ada/a wheel.whl[sign]'"),
        ("tools/name", ["uv-receipt.toml"], False, EDITABLE, "uv tool install '/home/ada/sources[sign]'"),
    ],
)
def test_installing_names_the_tool_of_the_environment(
    folder: str,
    files: list[str],
    has_pip: bool,
    origin: str | None,
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Regression: under uvx, whose environments have no pip, errors named pip."""
    environment = tmp_path / folder
    environment.mkdir(parents=True)
    for name in files:
        (environment / name).touch()
    monkeypatch.setattr(sys, "prefix", str(environment))
    monkeypatch.setattr(util, "find_spec", lambda name: object() if has_pip else None)
    monkeypatch.setattr(metadata, "distribution", lambda name: SimpleNamespace(read_text=lambda file: origin))
    assert installing("sign") == command


@pytest.mark.parametrize(
    ("folder", "file", "has_pip", "command"),
    [
        ("venv", "pyvenv.cfg", True, "pip install"),
        ("venv", "pyvenv.cfg", False, "uv pip install"),
        ("archive-v0/a1b2", "pyvenv.cfg", False, "uv pip install --python {environment}"),
        ("tools/name", "uv-receipt.toml", False, "uv pip install --python {environment}"),
    ],
)
def test_installing_here_names_an_environment_that_is_not_activated(
    folder: str, file: str, has_pip: bool, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = tmp_path / folder
    environment.mkdir(parents=True)
    (environment / file).touch()
    monkeypatch.setattr(sys, "prefix", str(environment))
    monkeypatch.setattr(util, "find_spec", lambda name: object() if has_pip else None)
    assert installing_here("idna") == f"{command.format(environment=environment)} idna"
