"""The hosted models of a shared front with a simulated memory: loads, evictions and refusals."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from builder.runtime.contract import SCHEMA, ContractError
from builder.runtime.fields import InputError
from builder.runtime.hosted import HOSTED, Hosted, HostedModel, dump_hosted
from builder.runtime.shared import host as host_module
from builder.runtime.shared import loader as loader_module
from builder.runtime.shared.emitted import Front, package_of
from builder.runtime.shared.host import Host, Listing, LoadedModel, OutOfMemory
from builder.runtime.shared.loader import Loader, NotReady

BASE = 100  # bytes of a process without models
PATIENCE_S = 300.0


class CountedMemory:
    """Simulated memory of a process: `BASE` bytes plus its models, each as large as the file in its folder."""

    def __init__(self) -> None:
        self.bytes = BASE
        self.opened: list[str] = []

    def open(self, folder: Path) -> Front:
        self.opened.append(folder.parent.name)
        if (folder / "damaged").exists():
            raise ValueError("not a graph")
        return Front(_Weights(self, (folder / "weights").stat().st_size).answer, str)

    def resident(self) -> int:
        return self.bytes

    def trim(self) -> None:
        pass


class _Weights:
    def __init__(self, memory: CountedMemory, size: int) -> None:
        self.memory, self.size = memory, size
        memory.bytes += size

    def answer(self, requests: Sequence[Any]) -> list[Any]:
        return list(requests)

    def __del__(self) -> None:
        self.memory.bytes -= self.size


def _entry(version: int = 1, build: str = "a") -> HostedModel:
    return HostedModel(version, build, {"text_input": False}, {"embedding": (4,)}, {}, 8)


def _repository(folder: Path, **sizes: int) -> Listing:
    for name, size in sizes.items():
        (folder / name / "1").mkdir(parents=True)
        (folder / name / "1" / "weights").write_bytes(b"w" * size)
    (folder / HOSTED).write_text(dump_hosted(dict.fromkeys(sizes, _entry())))
    return Listing(folder)


@pytest.fixture
def counted() -> CountedMemory:
    return CountedMemory()


def _host(listing: Listing, counted: CountedMemory, limit: int) -> Host:
    return Host(listing, limit, counted.open, counted.resident, counted.trim)


def _ask(host: Host, name: str) -> None:
    """Send one request: load the model if it is missing, and finish."""
    host.release(host.acquire(name) or host.load(name))


def test_host_does_not_count_the_engines_memory_as_a_models(tmp_path: Path) -> None:
    """The first model of a process also loads the engine, whose memory must not be counted as the model's."""

    class Lazily(CountedMemory):
        def open(self, folder: Path) -> Front:
            self.bytes += 0 if self.opened else 60
            return super().open(folder)

    counted = Lazily()
    host = _host(_repository(tmp_path, a=50, b=50), counted, limit=BASE + 60 + 100)
    for name in "aba":
        _ask(host, name)
    assert counted.opened == ["a", "b", "a"]


def test_host_evicts_the_least_recently_used_model(tmp_path: Path, counted: CountedMemory) -> None:
    host = _host(_repository(tmp_path, a=50, b=50, c=50), counted, limit=BASE + 150)
    for name in "abac":
        _ask(host, name)
        assert counted.bytes <= host.limit
    assert sorted(host.loaded) == ["a", "c"], "100 bytes are set aside for c, which is known by its file alone"
    assert counted.opened == ["a", "b", "c"]
    _ask(host, "b")
    assert sorted(host.loaded) == ["a", "b", "c"], "now it is known that each takes 50"
    assert (host.loads, host.evictions) == (4, 1)


def test_host_keeps_a_model_in_use(tmp_path: Path, counted: CountedMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_module, "MEMORY_TIMEOUT_S", 0.0)
    host = _host(_repository(tmp_path, a=50, b=50), counted, limit=BASE + 100)
    used = host.load("a")
    with pytest.raises(OutOfMemory, match=r"b needs about 0 MB; .* --memory-mb"):
        host.load("b")
    assert list(host.loaded) == ["a"]
    host.release(used)
    del used
    host.load("b")
    assert list(host.loaded) == ["b"]


def test_host_waits_for_memory_of_a_model_in_use(tmp_path: Path, counted: CountedMemory) -> None:
    host = _host(_repository(tmp_path, a=50, b=50), counted, limit=BASE + 100)
    users = [host.load("a")]

    def leave() -> None:
        model = users.pop()
        host.release(model)
        time.sleep(0.2)  # its thread holds the model while it waits for a core
        del model

    timer = threading.Timer(0.1, leave)
    timer.start()
    _ask(host, "b")
    timer.join()
    assert "b" in host.loaded


def test_host_refuses_a_model_larger_than_its_memory_at_once(
    tmp_path: Path, counted: CountedMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_module, "EVICTION_GRACE_S", 10_000.0)
    monkeypatch.setattr(host_module, "MEMORY_TIMEOUT_S", 10_000.0)
    host = _host(_repository(tmp_path, large=5000), counted, limit=BASE + 100)
    with pytest.raises(OutOfMemory, match="large needs"):
        host.load("large")


def test_host_replaces_a_version_that_still_answers(tmp_path: Path, counted: CountedMemory) -> None:
    listing = _repository(tmp_path, a=50)
    host = _host(listing, counted, limit=10_000)
    old = host.load("a")
    (tmp_path / "a" / "2").mkdir()
    (tmp_path / "a" / "2" / "weights").write_bytes(b"w" * 70)
    (tmp_path / "written").write_text(dump_hosted({"a": _entry(2, "b")}))
    os.replace(tmp_path / "written", tmp_path / HOSTED)
    listing.refresh()
    new = host.load("a")
    assert counted.bytes == BASE + 120, "the old one has a request to answer"
    assert host.acquire("a") is new
    host.release(old)
    del old
    assert counted.bytes == BASE + 70


def test_listing_names_the_hosted_models_in_its_error(tmp_path: Path) -> None:
    listing = _repository(tmp_path, **{f"m{number:02}": 1 for number in range(12)})
    with pytest.raises(InputError, match=r"no model 'x' is hosted here; there are: m00, .*, m09 and 2 more"):
        listing.get("x")


def test_listing_keeps_the_previous_file_if_the_new_one_is_damaged(tmp_path: Path) -> None:
    listing = _repository(tmp_path, a=1)
    (tmp_path / "written").write_text("{")
    os.replace(tmp_path / "written", tmp_path / HOSTED)
    with pytest.raises(ContractError, match=r"hosted\.json cannot be read"):
        listing.refresh()
    assert listing.get("a") == _entry()
    for text in ('{"schema": 1, "models": {}}', f'{{"schema": {SCHEMA}}}'):
        (tmp_path / HOSTED).write_text(text)
        with pytest.raises(ContractError, match="build-repo share"):
            Hosted(tmp_path)


@pytest.mark.parametrize("entry", [3, {"version": "one"}, {"no": "version"}, {"versions": ["one"]}])
def test_listing_reports_a_damaged_entry_with_its_remedy(entry: Any, tmp_path: Path) -> None:
    """A second build of the model does not change the listing of the shared front."""
    (tmp_path / HOSTED).write_text(dump_hosted({"a": entry}))
    with pytest.raises(ContractError, match=r"hosted\.json\.a.*\. Share its models again: build-repo share$"):
        Hosted(tmp_path)["a"]


class Panic(BaseException):
    """Error that Rust libraries raise: not an Exception."""


class Waiting:
    """Loader over `host`, and the outcomes of its requests."""

    def __init__(self, host: Host) -> None:
        self.came: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.loader = Loader(host, self._answer, self._fail, lambda: None)

    def _answer(self, model: LoadedModel, jobs: Sequence[Any]) -> None:
        if "panic" in jobs:
            raise Panic("in the library of another language")
        self.came.put((model.name, list(jobs)))

    def _fail(self, jobs: Sequence[Any], error: Exception) -> None:
        self.came.put((error, list(jobs)))

    def next(self) -> Any:
        return self.came.get(timeout=PATIENCE_S)


def test_loader_answers_other_models_while_one_loads(tmp_path: Path, counted: CountedMemory) -> None:
    host = _host(_repository(tmp_path, hot=1, cold=1), counted, limit=10_000)
    _ask(host, "hot")
    begun, go_on, opened = threading.Event(), threading.Event(), host.opened

    def slow(folder: Path) -> Front:
        begun.set()
        assert go_on.wait(PATIENCE_S)
        return opened(folder)

    host.opened = slow
    waiting = Waiting(host)
    waiting.loader.request("cold", "a", ["first"])
    assert begun.wait(PATIENCE_S)
    _ask(host, "hot")
    assert host.acquire("cold") is None
    waiting.loader.request("cold", "a", ["second"])
    go_on.set()
    assert waiting.next() == ("cold", ["first", "second"]), "one load for all that wait"
    waiting.loader.stop()
    assert counted.opened == ["hot", "cold"]


def test_loader_goes_on_after_a_panic(tmp_path: Path, counted: CountedMemory) -> None:
    waiting = Waiting(_host(_repository(tmp_path, a=1, b=1), counted, limit=10_000))
    waiting.loader.request("a", "a", ["panic"])
    error, jobs = waiting.next()
    assert (str(error), jobs) == ("the model a failed: Panic: in the library of another language", ["panic"])
    waiting.loader.request("b", "a", ["another model's"])
    assert waiting.next() == ("b", ["another model's"])
    waiting.loader.stop()


def test_loader_limits_the_requests_that_wait_for_a_model(
    tmp_path: Path, counted: CountedMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Waiting requests are held in memory, and a large model takes long to load."""
    monkeypatch.setattr(loader_module, "MAX_WAITING", 3)
    host = _host(_repository(tmp_path, a=1, b=1), counted, limit=10_000)
    go_on, opened = threading.Event(), host.opened
    host.opened = lambda folder: opened(folder) if go_on.wait(PATIENCE_S) else pytest.fail("never told to go on")
    waiting = Waiting(host)
    waiting.loader.request("a", "a", ["one", "two"])
    with pytest.raises(NotReady, match="3 requests wait already until a is loaded; send the request again later"):
        waiting.loader.request("a", "a", ["three", "four"])
    waiting.loader.request("a", "a", ["three"])
    waiting.loader.request("b", "a", ["a", "batch", "of", "another"])
    go_on.set()
    assert waiting.next() == ("a", ["one", "two", "three"])
    assert waiting.next() == ("b", ["a", "batch", "of", "another"]), "however large, where nobody waits before it"
    waiting.loader.stop()


def test_loader_does_not_retry_a_failed_model_at_once(tmp_path: Path, counted: CountedMemory) -> None:
    listing = _repository(tmp_path, bad=1, good=1)
    (tmp_path / "bad" / "1" / "damaged").touch()
    waiting = Waiting(_host(listing, counted, limit=10_000))
    waiting.loader.request("bad", "a", ["one"])
    error, jobs = waiting.next()
    assert (str(error), jobs) == (
        "the model bad is not ready, it cannot be loaded: ValueError: not a graph",
        ["one"],
    )
    with pytest.raises(NotReady, match=r"the model bad is not ready, .*; it is tried again after 10 s"):
        waiting.loader.request("bad", "a", ["two"])
    waiting.loader.request("good", "a", ["three"])
    assert waiting.next() == ("good", ["three"])
    (tmp_path / "bad" / "1" / "damaged").unlink()
    waiting.loader.request("bad", "another build", ["four"])
    assert waiting.next() == ("bad", ["four"])
    waiting.loader.stop()
    assert counted.opened == ["bad", "good", "bad"]


def test_loader_keeps_the_previous_version_if_the_new_one_fails(tmp_path: Path, counted: CountedMemory) -> None:
    listing = _repository(tmp_path, a=1)
    host = _host(listing, counted, limit=10_000)
    _ask(host, "a")
    (tmp_path / "a" / "2").mkdir()
    (tmp_path / "a" / "2" / "damaged").touch()
    (tmp_path / "written").write_text(dump_hosted({"a": _entry(2, "b")}))
    os.replace(tmp_path / "written", tmp_path / HOSTED)
    listing.refresh()
    waiting = Waiting(host)
    waiting.loader.request("a", "b", ["one"])
    assert waiting.next() == ("a", ["one"])
    with pytest.raises(NotReady):
        waiting.loader.request("a", "b", ["two"])
    waiting.loader.stop()
    assert (host.loaded["a"].build, host.loaded["a"].users) == ("a", 0)


def test_loader_refuses_waiting_requests_when_it_stops(tmp_path: Path, counted: CountedMemory) -> None:
    host = _host(_repository(tmp_path, a=1, b=1), counted, limit=10_000)
    go_on, opened = threading.Event(), host.opened
    host.opened = lambda folder: opened(folder) if go_on.wait(PATIENCE_S) else pytest.fail("never told to go on")
    waiting = Waiting(host)
    waiting.loader.request("a", "a", ["one"])
    waiting.loader.names.put(None)
    waiting.loader.request("b", "a", ["two"])
    go_on.set()
    waiting.loader.stop()
    assert waiting.next() == ("a", ["one"])
    error, jobs = waiting.next()
    assert (str(error), jobs) == ("the server is stopping", ["two"])


def test_emitted_python_is_imported_once_for_equal_models(tmp_path: Path) -> None:
    write: Callable[[str, str], Any] = lambda name, text: (tmp_path / name / "sub" / "a.py").write_text(text)  # noqa: E731
    for name in ("one", "two", "other"):
        (tmp_path / name / "sub").mkdir(parents=True)
        write(name, "VALUE = 1" if name != "other" else "VALUE = 2")
    packages = [package_of(tmp_path / name) for name in ("one", "two", "other")]
    assert packages[0] == packages[1] != packages[2]


def test_memory_is_measured_and_trimmed() -> None:
    """Measure in a new process: the system may reclaim file pages of a large one."""
    program = """
from builder.runtime import process_memory as memory
before = memory.resident()
block = b"1" * (256 << 20)
held = memory.resident() - before
del block
memory.trim()
print(held >> 20, (memory.resident() - before) >> 20)
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    held, left = map(int, ran.stdout.split())
    assert held > 200
    assert left < 50
