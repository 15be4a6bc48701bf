"""Each broken repository is found by its rule, and whole ones are not; without a server here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from builder.repository.lint import lint
from builder.repository.lint.findings import Finding, Severity
from tests.repository.lint.cases import CASES

OF_THE_MACHINE = ("TR403", "TR404", "TR451", "TR452", "TR806")


@pytest.fixture(scope="module")
def findings(module_folder: Callable[[str], Path]) -> dict[str, list[Finding]]:
    """Return the findings of each case, all of them in one repository."""
    repository = module_folder("cases")
    for name, case in CASES.items():
        case.write(repository / name)
    findings = [finding for finding in lint(repository) if finding.code not in OF_THE_MACHINE]
    return {name: [finding for finding in findings if finding.model == name] for name in CASES}


@pytest.mark.parametrize("name", CASES)
def test_lint_finds_each_broken_rule(name: str, findings: dict[str, list[Finding]]) -> None:
    code, codes = CASES[name].code, {finding.code for finding in findings[name]}
    assert code in codes if code else not codes


def test_finding_names_file_field_and_line(findings: dict[str, list[Finding]]) -> None:
    (finding,) = findings["preferred_above"]
    assert (finding.severity, finding.file) == (Severity.ERROR, "preferred_above/config.pbtxt")
    assert (finding.field, finding.line) == ("dynamic_batching.preferred_batch_size", 7)
    assert str(finding) == (
        "preferred_above: a preferred batch has 16 rows and max_batch_size is 8; write sizes from 1 to 8"
    )
    step, _ = findings["step_of_no_input"]
    assert (step.field, step.line) == ("ensemble_scheduling.step[0].input_map[z]", 8)
    (weights,) = findings["onnx_weights"]
    assert (weights.file, weights.line) == ("onnx_weights/1/model.onnx", None)


def test_finding_of_an_unserved_version_is_a_warning(findings: dict[str, list[Finding]]) -> None:
    (finding,) = findings["broken_old_version"]
    assert (finding.severity, finding.file) == (Severity.WARNING, "broken_old_version/1/model.py")


def test_lint_checks_the_other_configurations_of_a_model(tmp_path: Path) -> None:
    CASES["whole"].write(tmp_path / "m")
    (tmp_path / "m" / "configs").mkdir()
    (tmp_path / "m" / "configs" / "fast.pbtxt").write_text('backend: "python" max_batch_size: -1')
    (finding,) = (finding for finding in lint(tmp_path) if finding.code not in OF_THE_MACHINE)
    assert (finding.code, finding.file, finding.line) == ("TR301", "m/configs/fast.pbtxt", 1)
