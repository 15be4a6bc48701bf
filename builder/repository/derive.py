"""Publish new settings of a model without a build, as its next version.

Unchanged files are hard links. The measurements of the build stay valid; the version's report names the changed
settings.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from builder.common.errors import RepositoryError
from builder.options.choices import KEEP
from builder.repository.check import check
from builder.repository.config.entries import numbered
from builder.repository.config.render import parse, quote
from builder.repository.locks import sync
from builder.repository.publish import move_in, remove_old_versions
from builder.repository.report.bom import BOM, bom
from builder.repository.report.page import PAGE, page
from builder.repository.report.record import BuildReport, read_report
from builder.repository.report.summary import REPORT as SUMMARY
from builder.repository.settings import Settings, read_settings, with_settings
from builder.repository.signing_keys import SIGNATURE
from builder.repository.transaction import changing
from builder.repository.versions import (
    BESIDE,
    CONFIG,
    REPORT,
    activate,
    adopt,
    require_front,
    served_number,
    version_numbers,
)
from builder.runtime.contract import FILE

POLICY = re.compile(
    r"^(  specific { versions: \[ )\d+( \] })$", re.MULTILINE
)  # as builder/repository/config/render writes it


def publish_settings(repository: Path, name: str, settings: Settings, reason: str, keep: int = KEEP) -> int:
    """Publish the served version of a model with other settings as its next version, and serve it; return its number.

    `reason`: for its report; `keep`: how many versions remain. Raises SpecError for settings that need a build, and
    RepositoryError; the repository is then as before.
    """
    require_front(repository, name)
    entry = repository / name
    with changing(repository, name) as change:
        adopt(change, entry)
        before, number = served_number(entry), max(version_numbers(entry)) + 1
        if before is None:
            raise RepositoryError(
                f"{name} has no version that is served; build-repo versions {name} shows those it has"
            )
        changed = with_settings(entry / str(before), settings)
        report = _report(read_report(entry, str(before)), changed, settings, reason, (before, number))
        if report.memory is not None and "slots" in settings:
            slots = read_settings(entry / str(before))["slots"]
            cache = report.memory["cache"] // slots * settings["slots"]
            report = replace(report, memory={**report.memory, "cache": cache})
            changed = {**changed, CONFIG: _with_new_memory(changed[CONFIG].decode(), report).encode()}
        staged = change.staging / "new" / name
        _write(staged, entry, changed, report, before)
        problems = check(staged.parent)
        if problems:
            raise RepositoryError(
                f"the model would not load with {dict(settings)}: {problems[0]}. Nothing was published"
            )
        move_in(change, staged, entry, number)
        activate(change, repository, [name], number)
        change.commit()
        remove_old_versions(repository, name, change.staging / "removed", keep, [number, before])
    return number


def _with_new_memory(config: str, report: BuildReport) -> str:
    """Return `config` with the model's new memory in the summary among its parameters."""
    parameters = parse(config, report.name).parameters
    if SUMMARY not in parameters or report.memory is None:
        return config
    summary = parameters[SUMMARY].string_value
    changed = {**json.loads(summary), "memory": sum(report.memory.values())}
    return config.replace(quote(summary), quote(json.dumps(changed, ensure_ascii=False, separators=(",", ":"))))


def _report(
    report: BuildReport, changed: Mapping[str, bytes], settings: Settings, reason: str, of: tuple[int, int]
) -> BuildReport:
    before, number = of
    serving = f"{before}/{FILE}"
    files = {**report.files[report.name], serving: hashlib.sha256(changed[serving]).hexdigest()}
    own = {numbered(path, number, of=before): digest for path, digest in files.items()}
    changes = f"{', '.join(f'{key} {value}' for key, value in settings.items())}, of version {before}: {reason}"
    return replace(report, version=number, files={**report.files, report.name: own}, settings=changes)


def _write(staged: Path, entry: Path, changed: Mapping[str, bytes], report: BuildReport, before: int) -> None:
    """Write the entry with its new version alone; copies of the files in BESIDE lie beside the version folder too."""
    folder = staged / str(report.version)
    shutil.copytree(entry / str(before), folder, copy_function=os.link, ignore=shutil.ignore_patterns(SIGNATURE))
    own = {
        FILE: changed[f"{before}/{FILE}"],
        CONFIG: _with_version(changed[CONFIG].decode(), report.version).encode(),
        REPORT: json.dumps(report.document(), indent=1, ensure_ascii=False).encode(),
        PAGE: page(report).encode(),
        BOM: bom(report).encode(),
    }
    for name, content in own.items():
        (folder / name).unlink(missing_ok=True)  # a hard link: the file it shares must not change
        (folder / name).write_bytes(content)
        sync(folder / name)
    for name in BESIDE:
        shutil.copyfile(folder / name, staged / name)
    sync(folder)


def _with_version(config: str, number: int) -> str:
    text, count = POLICY.subn(rf"\g<1>{number}\g<2>", config)
    if count != 1:
        raise RepositoryError(
            f"{CONFIG} has {count} version policies, not the one that build-repo writes: build it again"
        )
    return text
