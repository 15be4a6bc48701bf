"""Files downloaded from the Hub: all that transformers reads, and no code."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
from huggingface_hub import constants
from huggingface_hub.utils._paths import filter_repo_objects

from builder.checkpoints import fetch as fetch_module
from builder.checkpoints.fetch import fetch
from builder.checkpoints.hub import resolve_commit
from builder.common.errors import CheckpointError
from builder.common.progress import reporting_downloads
from tests.http_servers import http_server
from tests.hub import COMMIT, hub

READ = {
    "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "merges.txt", "spiece.model",
    "1_Pooling/config.json", "source.spm", "README.md", "chat_template.jinja",
    "additional_chat_templates/tool_use.jinja",
}  # fmt: skip
LEFT = {"pytorch_model.bin", "modeling_own.py", "training_args.bin", "tf_model.h5", "onnx/model.onnx"}


@pytest.mark.parametrize("weights", [True, False])
def test_fetch_downloads_the_files_that_transformers_reads(
    weights: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: a chat template in a separate file, as transformers saves it, was not downloaded."""
    fetched: set[str] = set()

    def snapshot(name: str, allow_patterns: list[str], **_: object) -> str:
        fetched.update(filter_repo_objects(sorted(READ | LEFT), allow_patterns=allow_patterns))
        return str(tmp_path)

    monkeypatch.setattr(fetch_module, "snapshot_download", snapshot)
    fetch("org/writer", None, weights)
    assert fetched == (READ if weights else READ - {"model.safetensors"})


@pytest.fixture
def hub_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Return a function that makes an address the Hub of this process, with an empty cache."""

    def use(url: str) -> None:
        resolve_commit.cache_clear()  # as in a process of its own
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", f"{url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        )
        monkeypatch.setattr(constants, "ENDPOINT", url)

    return use


def test_fetch_reports_the_bytes_of_a_download(hub_of: Callable[[str], None]) -> None:
    """A second fetch downloads nothing, and a Hub that does not answer leaves what is in the cache."""
    files = {"config.json": b"{}", "model-1.safetensors": bytes(30_000), "model-2.safetensors": bytes(20_000)}
    seen: list[tuple[float, float]] = []
    with reporting_downloads(lambda done, total: seen.append((done, total))):
        with hub("org/writer", {**files, "training_args.bin": bytes(1_000)}) as url:
            hub_of(url)
            folder, commit = fetch("org/writer", None, weights=True)
            reports = list(seen)
            fetch("org/writer", None, weights=True)
        assert fetch("org/writer", None, weights=True) == (folder, commit)
    assert {file.name: file.stat().st_size for file in folder.iterdir()} == {name: len(files[name]) for name in files}
    assert commit == COMMIT
    assert [total for _, total in reports] == [50_002] * 3
    assert sorted(done for done, _ in reports)[-1] == 50_002
    assert seen == reports


@pytest.mark.parametrize(
    ("gated", "revision", "message"),
    [
        (True, None, "org/writer is gated: ask for access at .*/org/writer"),
        (False, "v2", "org/writer has no revision v2"),
    ],
)
def test_fetch_says_why_the_hub_gives_no_file(
    hub_of: Callable[[str], None], gated: bool, revision: str | None, message: str
) -> None:
    """Regression: for both, the error said that there was no model of that name."""
    with hub("org/writer", {"config.json": b"{}"}, gated) as url, reporting_downloads(lambda done, total: None):
        hub_of(url)
        with pytest.raises(CheckpointError, match=message):
            fetch("org/writer", revision, weights=True)


@pytest.fixture
def failing_hub() -> Iterator[tuple[str, list[str]]]:
    """Yield the address of a Hub that is out of service, and the paths that were asked for.

    It closes the connection of one who asks for org/broken without an answer.
    """
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            if "broken" not in self.path:
                self.send_error(503)

        def log_message(self, *_: object) -> None:
            pass

    with http_server(Handler) as port:
        yield f"http://127.0.0.1:{port}", asked


def test_fetch_asks_a_hub_that_fails_once(hub_of: Callable[[str], None], failing_hub: tuple[str, list[str]]) -> None:
    """Regression: each part of a build asked again, from its key to the download, and waited as long again."""
    failing, asked = failing_hub
    with reporting_downloads(lambda done, total: None):
        with hub("org/writer", {"config.json": b"{}", "model.safetensors": bytes(100)}) as url:
            hub_of(url)
            cached = fetch("org/writer", None, weights=True)
        hub_of(failing)
        assert [fetch("org/writer", None, weights) for weights in (False, True)] == [cached, cached]
        with pytest.raises(CheckpointError, match=r"no folder org/other here.*503"):
            fetch("org/other", None, weights=True)
    assert asked == ["/api/models/org/writer", "/api/models/org/other"]


@pytest.mark.parametrize("weights", [True, False])
def test_fetch_refuses_a_hub_that_disconnects(
    weights: bool, hub_of: Callable[[str], None], failing_hub: tuple[str, list[str]]
) -> None:
    """Regression: errors of connections other than a refused one were tracebacks."""
    hub_of(failing_hub[0])
    with (
        reporting_downloads(lambda done, total: None),
        pytest.raises(CheckpointError, match=r"no folder org/broken here.*disconnected"),
    ):
        fetch("org/broken", None, weights)


@pytest.mark.parametrize(("revision", "listed"), [(None, None), (COMMIT, None), (COMMIT, "{")])
def test_fetch_waits_once_for_a_hub_that_never_answers(
    revision: str | None,
    listed: str | None,
    hub_of: Callable[[str], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Regression: it was waited for without end; where the commit was given, six times for each fetch.

    `listed`: the files of the commit in the cache, as a damaged document.
    """
    if listed is not None:
        trees = tmp_path / "cache" / "models--org--other" / "trees"
        trees.mkdir(parents=True)
        (trees / f"{COMMIT}.json").write_text(listed)
    monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 0.1)
    monkeypatch.setattr(time, "sleep", lambda _: None)  # between the library's attempts
    with socket.create_server(("127.0.0.1", 0)) as silent:
        hub_of(f"http://127.0.0.1:{silent.getsockname()[1]}")
        for weights in (False, True):
            with pytest.raises(CheckpointError, match=r"no folder org/other here.*timed out"):
                fetch("org/other", revision, weights)
        silent.setblocking(False)
        silent.accept()[0].close()
        with pytest.raises(BlockingIOError):
            silent.accept()


def test_fetch_takes_a_cached_commit_without_asking(hub_of: Callable[[str], None]) -> None:
    with hub("org/writer", {"config.json": b"{}"}) as url:
        hub_of(url)
        cached = fetch("org/writer", COMMIT, weights=False)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        hub_of(f"http://127.0.0.1:{silent.getsockname()[1]}")
        assert fetch("org/writer", COMMIT, weights=False) == cached
        silent.setblocking(False)
        with pytest.raises(BlockingIOError):
            silent.accept()
