"""Publish new settings of a model without a build, as its next version.

Unchanged files are hard links. The measurements of the build stay valid; the version's report names the changed
settings.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

from builder.common.errors import RepositoryError
from builder.options.choices import KEEP
from builder.repository.check import check
from builder.repository.config.entries import numbered
from builder.repository.config.render import CONFIG, parse, quote
from builder.repository.locks import write_synced
from builder.repository.publish import move_in, remove_old_versions, report_files
from builder.repository.report.record import SUMMARY, BuildReport, read_report
from builder.repository.settings import POLICY, Settings, read_settings, with_number, with_settings
from builder.repository.signing_keys import SIGNATURE
from builder.repository.transaction import changing
from builder.repository.versions import activate, adopt, copy_beside, require_front, served_number, version_numbers
from builder.runtime.contract import FILE


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
        report = _report(entry / str(before), number, changed[f"{before}/{FILE}"], settings, reason)
        config = with_number(changed[CONFIG].decode(), POLICY, "version_policy", number)
        own = {
            FILE: changed[f"{before}/{FILE}"],
            CONFIG: _with_memory(config, report).encode() if "slots" in settings else config.encode(),
            **report_files(report, name),
        }
        staged = change.staging / "new" / name
        new = staged / str(number)
        shutil.copytree(entry / str(before), new, copy_function=os.link, ignore=shutil.ignore_patterns(SIGNATURE))
        for file, content in own.items():
            (new / file).unlink(missing_ok=True)  # a hard link: the file it shares must not change
            write_synced(new / file, content)
        copy_beside(staged, number)
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


def _report(before: Path, number: int, serving: bytes, settings: Settings, reason: str) -> BuildReport:
    """Return the report of version `number`, with other settings and the serving.json `serving` than `before` has."""
    report = read_report(before.parent, before.name)
    digests = {**report.files[report.name], f"{before.name}/{FILE}": hashlib.sha256(serving).hexdigest()}
    own = {numbered(path, number, of=int(before.name)): digest for path, digest in digests.items()}
    memory = report.memory
    if memory is not None and "slots" in settings:
        memory = {**memory, "cache": memory["cache"] // read_settings(before)["slots"] * settings["slots"]}
    changes = ", ".join(f"{key} {value}" for key, value in settings.items())
    return replace(
        report,
        version=number,
        files={**report.files, report.name: own},
        memory=memory,
        settings=f"{changes}, of version {before.name}: {reason}",
    )


def _with_memory(config: str, report: BuildReport) -> str:
    """Return `config` with the model's memory in the summary among its parameters."""
    parameters = parse(config, report.name).parameters
    if SUMMARY not in parameters or report.memory is None:
        return config
    summary = parameters[SUMMARY].string_value
    changed = {**json.loads(summary), "memory": sum(report.memory.values())}
    return config.replace(quote(summary), quote(json.dumps(changed, ensure_ascii=False, separators=(",", ":"))))
