"""Cache entries are complete or absent while other processes write, read and remove concurrently."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from builder.cli import main
from builder.common.cache.entries import CacheEntries
from builder.common.cache.folder import ENGINES, IN_USE_S, PROGRAMS, fetched_folder, prune_fetched
from builder.common.files import link, write_atomically
from builder.common.hashing import sha256_of

GRAPH = b"graph" * 1000


def _write(entries: CacheEntries, key: str, graph: bytes, folder: Path, stage: str = "export") -> None:
    (folder / "exported").mkdir(parents=True, exist_ok=True)
    (folder / "exported" / "model.onnx").unlink(missing_ok=True)
    (folder / "exported" / "model.onnx").write_bytes(graph)
    entries.write(stage, key, "model", 1.5, f"document of {key}".encode(), folder, ["exported/model.onnx"])


def _read(entries: CacheEntries, key: str, folder: Path) -> bytes | None:
    entry = entries.find(key)
    return None if entry is None else entries.read(entry, folder)


def test_cache_returns_a_stage_unchanged(tmp_path: Path) -> None:
    entries = CacheEntries(tmp_path / "cache")
    _write(entries, "one", GRAPH, tmp_path / "made")
    _write(entries, "two", GRAPH, tmp_path / "made")
    assert len(list(entries.blobs.iterdir())) == 3, "the graph once"
    assert _read(entries, "one", tmp_path / "again") == b"document of one"
    assert (tmp_path / "again" / "exported" / "model.onnx").read_bytes() == GRAPH
    assert _read(entries, "three", tmp_path) is None


def test_cache_leaves_no_files_of_a_damaged_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a stage that runs again would write into a link to the cache's file."""
    entries, made = CacheEntries(tmp_path / "cache"), tmp_path / "made"
    made.mkdir()
    for name in ("model.onnx", "model.onnx.data"):
        (made / name).write_bytes(name.encode())
    entries.write("fuse", "one", "model", 1.5, b"", made, ["model.onnx", "model.onnx.data"])

    def failing(source: Path, target: Path) -> None:
        if target.name == "model.onnx.data":
            raise FileNotFoundError(source)  # another process has pruned it
        link(source, target)

    monkeypatch.setattr("builder.common.cache.entries.link", failing)
    assert _read(entries, "one", tmp_path / "again") is None
    assert list((tmp_path / "again").iterdir()) == []


def test_full_disk_on_read_leaves_the_stage_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The entry is intact, and building it again would take hours and as much disk."""
    entries = CacheEntries(tmp_path / "cache")
    _write(entries, "one", GRAPH, tmp_path / "made")

    def refuse(*_: object) -> str:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as full_disk:
        full_disk.setattr("builder.common.cache.entries.link", refuse)
        with pytest.raises(OSError, match="No space left on device"):
            _read(entries, "one", tmp_path / "again")
    assert _read(entries, "one", tmp_path / "again") == b"document of one"


def test_cache_reads_from_a_read_only_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entries = CacheEntries(tmp_path / "cache")
    _write(entries, "one", GRAPH, tmp_path / "made")

    def refuse(*_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "utime", refuse)
    assert _read(entries, "one", tmp_path / "again") == b"document of one"
    assert entries.find("one") is not None


def test_cache_counts_and_hashes_a_hard_linked_file_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The export and the fused graph share weights, which count once in the limit and are hashed once."""
    entries, made = CacheEntries(tmp_path / "cache"), tmp_path / "made"
    made.mkdir()
    (made / "exported.data").write_bytes(GRAPH)
    os.link(made / "exported.data", made / "fused.data")
    entries.write("fuse", "one", "model", 1.5, b"", made, ["exported.data", "fused.data"])
    entry, hashed = entries.find("one"), list[Path]()
    assert entry is not None
    assert entry.size == len(GRAPH)

    def noting(file: Path) -> str:
        hashed.append(file)
        return sha256_of(file)

    monkeypatch.setattr("builder.common.cache.entries.sha256_of", noting)
    assert entries.read(entry, tmp_path / "again") == b""
    assert len(hashed) == 1
    assert (tmp_path / "again" / "exported.data").samefile(tmp_path / "again" / "fused.data")


@pytest.mark.parametrize("damage", ["changed", "cut", "gone"])
@pytest.mark.parametrize("which", ["document", "file"])
def test_cache_recomputes_a_damaged_stage(tmp_path: Path, damage: str, which: str) -> None:
    entries = CacheEntries(tmp_path / "cache")
    _write(entries, "one", GRAPH, tmp_path / "made")
    entry = entries.find("one")
    assert entry is not None
    blob = entries.blobs / (entry.document if which == "document" else entry.files["exported/model.onnx"])
    content = blob.read_bytes()
    blob.unlink()
    if damage != "gone":
        blob.write_bytes(content[:-1] + (b"?" if damage == "changed" else b""))
    assert entries.read(entry, tmp_path / "again") is None
    assert entries.find("one") is None
    _write(entries, "one", GRAPH, tmp_path / "made")
    assert _read(entries, "one", tmp_path / "again") == b"document of one"


def test_prune_removes_the_least_recently_used_entries_first(tmp_path: Path) -> None:
    entries = CacheEntries(tmp_path / "cache")
    for number, key in enumerate(("old", "used", "new")):
        _write(entries, key, key.encode() * 1000, tmp_path / "made")
        os.utime(entries.stages / f"{key}.json", (number, number))
    assert _read(entries, "used", tmp_path / "again") is not None
    assert [entry.key for entry in entries.prune(8000)] == ["old"]
    assert [entry.key for entry in entries.prune(4500)] == ["new"]
    assert len(list(entries.blobs.iterdir())) == 2
    assert [entry.key for entry in entries.prune(0)] == ["used"]
    assert list(entries.blobs.iterdir()) == []


def test_prune_spares_blobs_that_another_process_is_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entries = CacheEntries(tmp_path / "cache")
    _write(entries, "one", GRAPH, tmp_path / "made")
    (entries.stages / "one.json").unlink()
    entries.prune(10**9)
    assert len(list(entries.blobs.iterdir())) == 2
    monkeypatch.setattr(time, "time", lambda: 2e9 + 1e9)
    entries.prune(10**9)
    assert list(entries.blobs.iterdir()) == []


def test_cache_restores_blobs_pruned_by_another_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prune can overtake a write if copying the files takes minutes."""
    entries = CacheEntries(tmp_path / "cache")

    def write_after_a_prune(path: Path, content: bytes) -> None:
        if path.parent == entries.stages:
            entries.prune(10**9)
            assert list(entries.blobs.iterdir()) == []
        write_atomically(path, content)

    monkeypatch.setattr(time, "time", lambda: 2e9 + 1e9)  # nothing was written just now
    monkeypatch.setattr("builder.common.cache.entries.write_atomically", write_after_a_prune)
    _write(entries, "one", GRAPH, tmp_path / "made")
    assert _read(entries, "one", tmp_path / "again") == b"document of one"
    assert (tmp_path / "again" / "exported" / "model.onnx").read_bytes() == GRAPH


def test_cache_writes_nothing_to_a_nearly_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entries = CacheEntries(tmp_path / "cache")
    monkeypatch.setattr("builder.common.cache.entries.FREE_DISK_SHARE", 1.0)
    _write(entries, "one", GRAPH, tmp_path / "made")
    assert entries.find("one") is None


def test_processes_share_the_cache_while_it_is_pruned(tmp_path: Path) -> None:
    """Each process reads its complete entry or nothing, never a partial entry or another one's."""
    program = """
import sys
from pathlib import Path
from builder.common.cache import entries as cache
cache.FREE_DISK_SHARE = 0.0
entries, place, own = cache.CacheEntries(Path(sys.argv[1])), Path(sys.argv[2]), sys.argv[3]
whole = 0
for turn in range(60):
    graph = f"graph {turn % 3}".encode() * 2000
    (place / "model.onnx").unlink(missing_ok=True)
    (place / "model.onnx").write_bytes(graph)
    entries.write("export", f"key{turn % 3}", own, 0.1, graph, place, ["model.onnx"])
    entry = entries.find(f"key{turn % 3}")
    read = None if entry is None else entries.read(entry, place)
    if read is not None:
        assert read == graph == (place / "model.onnx").read_bytes()
        whole += 1
    if own == "a" and turn % 5 == 0:
        entries.prune(0)
print(whole)
"""
    running = []
    for own in "abc":
        (tmp_path / own).mkdir()
        command = [sys.executable, "-c", program, str(tmp_path / "cache"), str(tmp_path / own), own]
        running.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    for process in running:
        out, err = process.communicate(timeout=600)
        assert process.returncode == 0, err
        assert int(out) > 10
    entries = CacheEntries(tmp_path / "cache")
    for number in range(3):
        read = _read(entries, f"key{number}", tmp_path / "last")
        assert read in (None, f"graph {number}".encode() * 2000)


def test_link_copies_if_hard_links_are_not_permitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_bytes(GRAPH)
    assert link(tmp_path / "a", tmp_path / "b") == "link"
    assert (tmp_path / "a").samefile(tmp_path / "b")

    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "link", refuse)
    assert link(tmp_path / "a", tmp_path / "c") in ("reflink", "copy")
    (tmp_path / "c").write_bytes(b"other")
    assert (tmp_path / "a").read_bytes() == GRAPH
    with pytest.raises(FileExistsError):
        link(tmp_path / "a", tmp_path / "c")


def test_cache_command_lists_and_prunes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BUILD_REPO_CACHE", str(tmp_path / "cache"))
    _write(CacheEntries(tmp_path / "cache"), "one", GRAPH, tmp_path / "made")
    assert main(["cache"]) == 0
    assert "export" in capsys.readouterr().out
    assert main(["cache", "prune"]) == 1
    assert "--max-gb" in capsys.readouterr().err
    assert main(["cache", "--max-gb", "1"]) == 1
    capsys.readouterr()
    assert main(["cache", "prune", "--max-gb", "0"]) == 0
    assert "1 stages are gone, of 1 models" in capsys.readouterr().err
    assert list((tmp_path / "cache" / "blobs").iterdir()) == []


def test_cache_command_prunes_fetched_programs_before_stages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The least recently used programs are removed first, and never those that may be in use."""
    monkeypatch.setenv("BUILD_REPO_CACHE", str(tmp_path))
    kept = ((ENGINES, "onnxruntime-1.0"), (PROGRAMS, "tritonclient-1.0"), (ENGINES, "openvino-1.0"))
    for age, (kind, name) in zip((3, 2, 0), kept, strict=True):
        (tmp_path / kind / name).mkdir(parents=True)
        (tmp_path / kind / name / "library").write_bytes(b"1" * 1000)
        os.utime(tmp_path / kind / name, (time.time() - age * IN_USE_S,) * 2)
    entries = CacheEntries(tmp_path)
    _write(entries, "one", GRAPH, tmp_path / "made")
    assert main(["cache"]) == 0
    shown = capsys.readouterr().out
    assert "engines of releases" in shown
    assert "fetched programs" in shown
    assert main(["cache", "prune", "--max-gb", "0.0000100"]) == 0
    assert [entry.key for entry, _ in entries.all()] == ["one"]
    assert main(["cache", "prune", "--max-gb", "0.0000025"]) == 0
    assert "gone too: onnxruntime-1.0" in capsys.readouterr().err
    assert list(entries.all()) == []
    assert main(["cache", "prune", "--max-gb", "0"]) == 0
    assert [path.name for kind in (ENGINES, PROGRAMS) for path in (tmp_path / kind).iterdir()] == ["openvino-1.0"]


def test_fetched_folder_updates_its_last_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BUILD_REPO_CACHE", str(tmp_path))
    folder = fetched_folder(PROGRAMS, "one")
    assert not folder.exists()
    folder.mkdir(parents=True)
    (folder / "library").write_bytes(b"1")
    os.utime(folder, (0, 0))
    assert fetched_folder(PROGRAMS, "one") == folder
    assert prune_fetched(0) == ([], 0)
    os.utime(folder, (0, 0))
    assert prune_fetched(0) == (["one"], 0)
