"""Publishing: written beside the repository, synced, checked, then moved in; never half a model.

All entries of one build change together. A build that is interrupted leaves what was there: an exception rolls
back at once, a killed process is rolled back by the next `recover` (each build, check and serve begins with it).
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from builder.errors import RepositoryError
from builder.page import PAGE, page
from builder.repository.check import check
from builder.repository.layout import RepositoryEntry
from builder.repository.render import render
from builder.verify.verdict import Unverified, Verified

JOURNAL = "journal.json"


def publish(repository: Path, made: Verified | Unverified) -> None:
    """Write its entries, each with the report as its build.json, and move them into `repository` together.

    The report lies beside the front model, the first entry, as a page too. Raises RepositoryError when the disk or the
    folder does not allow it; the repository is then as before.
    """
    if not isinstance(made, Verified | Unverified):
        raise TypeError(f"only Verified or Unverified entries are published, not {type(made).__name__}")
    entries = [replace(made.entries[0], files={**made.entries[0].files, PAGE: page(made.report).encode()})]
    entries.extend(made.entries[1:])
    report = json.dumps(made.report.document(), indent=1, ensure_ascii=False).encode()
    try:
        repository.mkdir(parents=True, exist_ok=True)
        with _staging(repository) as staging:
            for entry in entries:
                _write(staging / "new" / entry.name, entry, report)
            problems = check(staging / "new")
            if problems:
                raise RepositoryError(f"the new model would not load: {problems[0]}. Nothing was published")
            _swap(repository, staging, [entry.name for entry in entries])
    except OSError as error:
        raise RepositoryError(
            f"{repository} could not be written ({error.strerror or error}): nothing in it was changed. "
            "Free some space, or choose another folder with --output"
        ) from error


def existing_source(repository: Path, name: str) -> str | None:
    """The checkpoint that the model `name` in `repository` was built from; None where there is no such model."""
    report = repository / name / "build.json"
    if not (repository / name).exists():
        return None
    try:
        return str(json.loads(report.read_text("utf-8"))["checkpoint"]["source"])
    except (OSError, ValueError, KeyError):
        return "something else than build-repo"


def recover(repository: Path) -> list[str]:
    """Finish what killed builds left beside `repository`: put back what they had moved away."""
    recovered = []
    for staging in sorted(repository.parent.glob(f".{repository.name}.*.staging")):
        if _in_use(staging):
            continue
        if (staging / JOURNAL).is_file():
            names = json.loads((staging / JOURNAL).read_text("utf-8"))
            _roll_back(repository, staging, names)
            recovered.extend(names)
        shutil.rmtree(staging, ignore_errors=True)
    return recovered


@contextlib.contextmanager
def _staging(repository: Path) -> Iterator[Path]:
    """A folder on the repository's own file system, outside it: a running Triton never looks there."""
    place = tempfile.mkdtemp(prefix=f".{repository.name}.{os.getpid()}.", suffix=".staging", dir=repository.parent)
    staging = Path(place)
    try:
        yield staging
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _in_use(staging: Path) -> bool:
    """Whether the process that made this folder still runs."""
    process = staging.name.rsplit(".", 3)[-3]
    return process.isdigit() and int(process) != os.getpid() and Path(f"/proc/{process}").exists()


def _write(folder: Path, entry: RepositoryEntry, report: bytes) -> None:
    contents = {
        **entry.files,
        "config.pbtxt": render(entry.config).encode(),
        "build.json": report,
    }
    for name, content in contents.items():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, bytes):
            target.write_bytes(content)
        else:
            shutil.copyfile(content, target)
        _sync(target)
    for directory in [folder, *(path for path in folder.rglob("*") if path.is_dir())]:
        _sync(directory)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _swap(repository: Path, staging: Path, names: Sequence[str]) -> None:
    """Move the old entries out and the new ones in; the journal says how to go back until all are in.

    The last entry moves first and the first last, so that a front model never appears before its engine.
    """
    (staging / "old").mkdir()
    (staging / JOURNAL).write_text(json.dumps(list(names)), "utf-8")
    _sync(staging / JOURNAL)
    _sync(staging)
    try:
        for name in reversed(names):
            if (repository / name).exists():
                os.rename(repository / name, staging / "old" / name)
            os.rename(staging / "new" / name, repository / name)
        _sync(repository)
        os.unlink(staging / JOURNAL)
    except BaseException:
        _roll_back(repository, staging, names)
        raise


def _roll_back(repository: Path, staging: Path, names: Sequence[str]) -> None:
    for name in names:
        moved_in = not (staging / "new" / name).exists()
        if moved_in and (repository / name).exists():
            os.rename(repository / name, staging / "new" / name)
        if (staging / "old" / name).exists():
            os.rename(staging / "old" / name, repository / name)
