"""Check that a stock Triton of the release would load a repository, and that its files are those that were built.

Reports the errors of builder/repository/lint as sentences; publishing runs it first.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from builder.common.errors import RepositoryError
from builder.common.hashing import FileDigests
from builder.repository.lint import lint
from builder.repository.lint.findings import Severity
from builder.repository.report.record import read_report
from builder.repository.versions import loaded_numbers
from builder.runtime.recipe import compile as program

PENDING = "TR653"


def check(repository: Path, triton: str | None = None, digests: FileDigests | None = None) -> list[str]:
    """Return the errors found, one sentence each, with the model's name.

    `triton`: the release to check against, instead of the one that each model was built for. A plan that still has to
    be compiled on a machine with a GPU is not an error: see `pending`. `digests`: of files that the caller has just
    written; None: every file is read.
    """
    errors = [finding for finding in lint(repository, triton, digests=digests) if finding.severity is Severity.ERROR]
    return [str(finding) for finding in errors if finding.code != PENDING]


def pending(repository: Path, unserved: bool = False) -> dict[str, str]:
    """Return the models whose plan a machine with a GPU still has to compile: a sentence for each, by name.

    `unserved`: include versions that replace an earlier one once they are compiled.
    """
    versions = [recipe.parent.parent for recipe in sorted(repository.glob(f"*/*/{program.FOLDER}/recipe.json"))]
    return {
        version.parent.name: f"{version.parent.name}: its plan is not compiled yet; on the GPU that is to serve it: "
        f"build-repo compile {repository}"
        for version in versions
        if not (version / program.PLAN).is_file() and (unserved or int(version.name) in loaded_numbers(version.parent))
    }


def verdicts(repository: Path) -> dict[str, str]:
    """Return each model's verdict (whether it was verified, and on what), by name.

    Reports that cannot be read are left out: `check` names them.
    """
    by_name = {}
    for path in sorted(repository.glob("*/build.json")):
        with contextlib.suppress(RepositoryError):
            report = read_report(repository, path.parent.name)
            if report.name == path.parent.name:  # an engine beside its front has the same report
                by_name[report.name] = report.verdict
    return by_name
