"""Publish a build as the next version of its model: write it beside the repository, sync, check and move it in.

A version is a front and, where its engine is a Triton model of its own, that too, with the same number:

NAME/N/         all of version N: the files that its backend reads and, beside them, its config.pbtxt, build.json and,
                of a front, report.html and bom.cdx.json
NAME/warmup/N/  requests that warm an engine up, if there are any: Triton looks for them only there
NAME/config.pbtxt, build.json, report.html, bom.cdx.json
                copies of those of the version that is served (builder/repository/versions.py)

Files that are the same in two versions, of one model or of two, are hard links: a file of a version is never written
again, only replaced.
"""

from __future__ import annotations

import filecmp
import hashlib
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from builder.common.cache.folder import Published
from builder.common.errors import RepositoryError
from builder.common.files import clone, link
from builder.common.hashing import WRITTEN_DIGESTS
from builder.options.choices import KEEP
from builder.repository.check import check
from builder.repository.config.entries import RepositoryEntry, numbered
from builder.repository.config.render import CONFIG, render
from builder.repository.locks import explain_os_errors, sync, what_to_do
from builder.repository.report.bom import BOM, bom
from builder.repository.report.page import PAGE, page
from builder.repository.report.record import REPORT, BuildReport, checkpoint_source, read_report
from builder.repository.transaction import RepositoryChange, changing
from builder.repository.verdict import Unverified, Verified
from builder.repository.versions import activate, adopt, copy_beside, prune, served_number, version_numbers
from builder.runtime.recipe.compile import FOLDER as RECIPE


def publish(
    repository: Path,
    outcome: Verified | Unverified,
    keep: int = KEEP,
    first: int = 1,
    workplace: Path | None = None,
    since: int | None = None,
) -> BuildReport:
    """Publish the entries as the next version in `repository`, serve it and return its report.

    `keep`: how many versions remain. `first`: the smallest number that it may have. `workplace`: a folder of this build
    alone, whose files are not written twice. `since`: the newest version when the build began; if another process has
    since published a later one of the same build, that version is returned, so that two equal builds do not displace
    the two versions before.

    A version that cannot be served yet, because a GPU still has to compile its plan, does not replace one that can. The
    report lies in the version as build.json. Raises RepositoryError if the model would not load, or the disk or the
    folder does not allow it; the repository is then as before.
    """
    if not isinstance(outcome, Verified | Unverified):
        raise TypeError(f"only Verified or Unverified entries are published, not {type(outcome).__name__}")
    with explain_os_errors(repository):
        repository.mkdir(parents=True, exist_ok=True)
    names = [entry.name for entry in outcome.entries]
    with changing(repository, names[0]) as change:
        later = _published_since(repository / names[0], since, outcome.report.build_key)
        if later is not None:
            return later
        number = max([first, *(1 + n for name in names for n in version_numbers(repository / name))])
        entries, report = _as_version(outcome, number)
        published = Published(repository)
        for entry in entries:
            _write(change.staging / "new" / entry.name, entry, report, repository / entry.name, published, workplace)
        problems = check(change.staging / "new", digests=WRITTEN_DIGESTS)
        if problems:
            raise RepositoryError(f"the new model would not load: {problems[0]}. Nothing was published")
        before = _served_number(repository / names[0])
        for entry in reversed(entries):
            move_in(change, change.staging / "new" / entry.name, repository / entry.name, number)
        needs_compiling = any(path.split("/")[1] == RECIPE for path in entries[-1].files)
        if before is None or not needs_compiling:
            activate(change, repository, names, number)
        change.commit()
        for name, files in report.files.items():
            for path, digest in files.items():
                published.note(digest, repository / name / path)
        remove_old_versions(repository, names[0], change.staging / "removed", keep, [number, before])
    return report


def _published_since(entry: Path, since: int | None, key: str | None) -> BuildReport | None:
    """Return the report of the newest version if it is later than `since` and of the same checkpoint and options."""
    number = max(version_numbers(entry), default=0)
    if since is None or key is None or number <= since:
        return None
    with suppress(RepositoryError):  # a damaged one is replaced
        report = read_report(entry, str(number))
        return report if report.build_key == key else None
    return None


def remove_old_versions(repository: Path, name: str, staging: Path, keep: int, also: Sequence[int | None]) -> None:
    """Move the versions of a model to `staging`, except `keep` of them: `also`, then the newest."""
    try:
        staging.mkdir()
        prune(repository, name, staging, keep, also)
    except OSError as error:
        raise RepositoryError(
            f"{name} was published, but its earlier versions could not be removed ({error.strerror or error}). "
            f"{what_to_do(error)}"
        ) from error


def existing_source(repository: Path, name: str) -> str | None:
    """Return the checkpoint that the model `name` in `repository` was built from; None if there is no such model."""
    if not (repository / name).exists():
        return None
    return checkpoint_source(repository / name / REPORT) or "something else than build-repo"


def _as_version(outcome: Verified | Unverified, number: int) -> tuple[list[RepositoryEntry], BuildReport]:
    """Return the entries and their report as version `number`."""
    entries = [entry.at(number) for entry in outcome.entries]
    files = {}
    for entry in entries:
        hashes = {numbered(path, number): digest for path, digest in outcome.report.files[entry.name].items()}
        sums = {path: hashlib.sha256(c).hexdigest() for path, c in entry.files.items() if isinstance(c, bytes)}
        files[entry.name] = {**hashes, **sums}
    return entries, replace(outcome.report, version=number, files=files)


def _served_number(entry: Path) -> int | None:
    try:
        return served_number(entry)
    except RepositoryError:  # the config.pbtxt is damaged: this build replaces it
        return None


def _write(
    folder: Path,
    entry: RepositoryEntry,
    report: BuildReport,
    existing: Path,
    published: Published,
    workplace: Path | None,
) -> None:
    """Write one entry without its other versions.

    A file that an earlier version (in `existing`), another model or `workplace` already has becomes a link to it.
    """
    version, digests = entry.config.version, report.files[entry.name]
    documents = {CONFIG: render(entry.config).encode(), **report_files(report, entry.name)}
    own: dict[str, bytes | Path] = {f"{version}/{name}": content for name, content in documents.items()}
    for name, content in {**entry.files, **own}.items():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        earlier = [existing / numbered(name, n, of=version) for n in reversed(version_numbers(existing))]
        digest = digests.get(name, "")
        if not _linked(target, content, [*earlier, *published.find(digest)]):
            if isinstance(content, bytes):
                target.write_bytes(content)
            elif workplace is not None and content.is_relative_to(workplace):
                link(content, target)
            else:
                clone(content, target)
            sync(target)
        published.fresh[digest] = target
    copy_beside(folder, version)


def report_files(report: BuildReport, entry: str) -> dict[str, bytes]:
    """Return the files that describe a version, by name; of an engine beside its front, build.json alone."""
    files = {REPORT: report.to_json().encode()}
    if entry == report.name:
        files |= {PAGE: page(report).encode(), BOM: bom(report).encode()}
    return files


def _linked(target: Path, content: bytes | Path, earlier: Sequence[Path]) -> bool:
    """Link `target` to the first file of `earlier` with this content; return False without one, or if links fail."""
    for path in earlier:
        if path.is_file() and _has_content(path, content):
            try:
                os.link(path, target)
            except OSError:
                return False
            return True
    return False


def _has_content(path: Path, content: bytes | Path) -> bool:
    if isinstance(content, Path):
        return filecmp.cmp(path, content, shallow=False)
    return path.stat().st_size == len(content) and path.read_bytes() == content


def move_in(change: RepositoryChange, staged: Path, entry: Path, number: int) -> None:
    """Move a staged version beside the others, where Triton does not load it yet; the first with its whole entry."""
    if not entry.exists():
        change.move(staged, entry)
        return
    if _served_number(entry) is not None:
        adopt(change, entry)
    for part in (f"warmup/{number}", str(number)):
        if (staged / part).is_dir():
            change.move(staged / part, entry / part)
