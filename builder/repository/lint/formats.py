"""Findings for machines: JSON, SARIF 2.1.0 (OASIS), and annotations of GitHub Actions."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from builder.common.distribution import own_version
from builder.repository.lint.findings import Finding, Severity
from builder.repository.lint.rule import all_rules

SARIF = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"


def as_json(repository: Path, findings: Sequence[Finding]) -> str:
    """Return a JSON object with the repository and its findings, each with the fields of a Finding."""
    documents = [{**asdict(finding), "fix": None if finding.fix is None else str(finding.fix)} for finding in findings]
    return json.dumps({"repository": str(repository), "findings": documents}, indent=1, ensure_ascii=False)


def as_sarif(repository: Path, findings: Sequence[Finding]) -> str:
    """Return a SARIF log of one run, with every rule.

    Paths are relative to the repository, whose address is the base REPOSITORY.
    """
    rules = [
        {
            "id": rule.code,
            "name": rule.check.__name__,
            "shortDescription": {"text": rule.what},
            "fullDescription": {"text": rule.why},
            "help": {"text": f"wrong:\n{rule.wrong}\n\nright:\n{rule.right}"},
            "defaultConfiguration": {"level": rule.severity.value},
        }
        for rule in all_rules()
    ]
    driver = {"name": "build-repo check", "version": own_version(), "rules": rules}
    run = {
        "tool": {"driver": driver},
        "originalUriBaseIds": {"REPOSITORY": {"uri": f"{repository.resolve().as_uri()}/"}},
        "results": [_sarif_result(finding) for finding in findings],
    }
    return json.dumps({"$schema": SARIF, "version": "2.1.0", "runs": [run]}, indent=1, ensure_ascii=False)


def _sarif_result(finding: Finding) -> dict[str, Any]:
    location: dict[str, Any] = {"artifactLocation": {"uri": finding.file or ".", "uriBaseId": "REPOSITORY"}}
    if finding.line is not None:
        location["region"] = {"startLine": finding.line}
    return {
        "ruleId": finding.code,
        "level": finding.severity.value,
        "message": {"text": str(finding)},
        "locations": [{"physicalLocation": location}],
    }


def as_github(repository: Path, findings: Sequence[Finding]) -> str:
    """Return a workflow command per line. Paths begin with `repository`, which a workflow gives from its checkout."""
    return "\n".join(_annotation(repository, finding) for finding in findings)


def _annotation(repository: Path, finding: Finding) -> str:
    properties = {"file": str(repository / finding.file), "title": finding.code}
    if finding.line is not None:
        properties["line"] = str(finding.line)
    level = "error" if finding.severity is Severity.ERROR else "warning"
    attributes = ",".join(f"{name}={_escaped(value, ':,')}" for name, value in properties.items())
    return f"::{level} {attributes}::{_escaped(str(finding))}"


def _escaped(text: str, more: str = "") -> str:
    """Escape as GitHub's own toolkit does: actions/toolkit, packages/core/src/command.ts."""
    for character in f"%\r\n{more}":
        text = text.replace(character, f"%{ord(character):02X}")
    return text


FORMATS: dict[str, Callable[[Path, Sequence[Finding]], str]] = {
    "json": as_json,
    "sarif": as_sarif,
    "github": as_github,
}
