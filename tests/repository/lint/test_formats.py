"""Findings for machines: SARIF, GitHub and JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from builder.cli import main
from builder.repository.lint.findings import Finding, Severity
from builder.repository.lint.formats import as_github
from builder.repository.lint.rule import all_rules
from tests.repository.lint.cases import CASES


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    CASES["preferred_above"].write(tmp_path / "m")
    return tmp_path


def _printed(repository: Path, form: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["check", str(repository), "--format", form]) == 1
    return capsys.readouterr().out


def test_json_format_has_every_field_of_a_finding(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = json.loads(_printed(repository, "json", capsys))
    (finding,) = (finding for finding in document["findings"] if finding["code"] == "TR302")
    assert set(finding) == set(Finding.__dataclass_fields__)
    assert (finding["severity"], finding["file"], finding["line"]) == ("error", "m/config.pbtxt", 7)


def test_sarif_has_every_rule_and_locations_in_the_repository(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run,) = json.loads(_printed(repository, "sarif", capsys))["runs"]
    assert [rule["id"] for rule in run["tool"]["driver"]["rules"]] == [rule.code for rule in all_rules()]
    (result,) = (result for result in run["results"] if result["ruleId"] == "TR302")
    location = result["locations"][0]["physicalLocation"]
    assert location["artifactLocation"] == {"uri": "m/config.pbtxt", "uriBaseId": "REPOSITORY"}
    assert (result["level"], location["region"]) == ("error", {"startLine": 7})
    assert run["originalUriBaseIds"]["REPOSITORY"]["uri"] == f"{repository.as_uri()}/"


def test_github_format_annotates_the_line(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = _printed(repository, "github", capsys).splitlines()
    (line,) = (line for line in lines if "TR302" in line)
    assert line.startswith(f"::error file={repository}/m/config.pbtxt,title=TR302,line=7::m: a preferred batch")


def test_github_format_escapes_workflow_commands() -> None:
    finding = Finding("TR104", Severity.WARNING, "m", "a,b:c", "", None, "100% of\nit", "")
    assert as_github(Path("r"), [finding]) == "::warning file=r/a%2Cb%3Ac,title=TR104::m: 100%25 of%0Ait"
