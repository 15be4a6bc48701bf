"""Lint a repository: check that a stock Triton loads it and serves it as intended.

A rule is a function in rules/ that yields problems; it reads files and starts nothing. Publishing runs the errors among
them first (builder/repository/check.py).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from builder.common.hashing import FileDigests
from builder.repository.lint.findings import Finding
from builder.repository.lint.repository import Repository
from builder.repository.lint.rule import all_rules
from builder.repository.sharing.hosting import hosted_repositories


def lint(
    repository: Path, triton: str | None = None, verify_key: Path | None = None, digests: FileDigests | None = None
) -> list[Finding]:
    """Return the findings, model by model, in the order of the rules' codes.

    `triton`: the release to check against, instead of the one that each model was built for. `verify_key`: the key that
    every model must have been signed with, as builder/repository/signatures.py takes it. `digests`: of files that the
    caller has just written; None: every file is read. Raises SpecError if the key is not one.
    """
    linted = Repository(repository, triton, verify_key, digests or FileDigests())
    findings = [finding for rule in all_rules() for finding in rule.findings(linted)]
    for path in hosted_repositories(repository):
        hosted, prefix = Repository(path, triton, digests=linted.digests), f"{path.parent.name}/{path.name}"
        for rule in all_rules():
            for finding in rule.findings(hosted) if rule.scope is not Repository else ():  # no server loads all of them
                findings.append(replace(finding, model=f"{prefix}/{finding.model}", file=f"{prefix}/{finding.file}"))
    return sorted(dict.fromkeys(findings), key=lambda finding: finding.model)
