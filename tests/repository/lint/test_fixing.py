"""--fix applies fixes that need no decision, reports them, and leaves everything else as it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from builder.cli import main
from builder.repository.config.render import parse
from builder.repository.lint import lint
from builder.repository.lint.findings import Edit, Severity
from builder.repository.lint.pbtxt import edited, field_spans, fix
from tests.repository.lint.cases import CASES, ENSEMBLE, ON_CPU, PYTHON, WHOLE, parameter

LIST = """# a model
name: "old"  # its name
input [
  { name: "x", data_type: TYPE_FP32, dims: [ 1, 2 ] },
  { name: "y" data_type: TYPE_FP32 dims: 3 }
]
parameters: { key: "a" value: { string_value: "{ not a brace }" } }
parameters { key: 'b' value < string_value: "1" "2" > }
response_cache { enable: true }; max_batch_size: 8  # its rows"""


def test_field_spans_cover_every_field() -> None:
    lines = {path: spot.line for path, spot in field_spans(LIST).items()}
    assert lines["input.dims"] == lines["input.name"] == 4
    assert (lines["input[1].name"], lines["parameters[a]"], lines["parameters[1].value.string_value"]) == (5, 7, 8)
    assert lines["response_cache.enable"] == lines["max_batch_size"] == 9


def test_edit_changes_nothing_else() -> None:
    result = edited(LIST, [Edit("name", 'n"w'), Edit("parameters[a]"), Edit("response_cache")], "m")
    assert result is not None
    assert result.splitlines()[:2] == ["# a model", r'name: "n\"w"  # its name']
    assert result.splitlines()[6:] == [
        'parameters { key: \'b\' value < string_value: "1" "2" > }',
        " max_batch_size: 8  # its rows",
    ]
    assert parse(result, "m").name == 'n"w'


def test_edit_leaves_unknown_syntax_unchanged() -> None:
    listed = 'parameters [ { key: "a" value { string_value: "1" } }, { key: "b" value { string_value: "1" } } ]'
    assert edited(listed, [Edit("parameters[a]")], "m") is None


@pytest.mark.parametrize(
    ("config", "changed"),
    [
        (f'name: "another"\n{WHOLE}', 'wrote name: "m" (TR105)'),
        (f"{WHOLE}model_transaction_policy {{ decoupled: true }}\nresponse_cache {{ enable: true }}", "TR309"),
        (WHOLE.replace("max_batch_size: 8", "max_batch_size: 0") + "dynamic_batching { }", "left out dynamic_batching"),
    ],
)
def test_fixed_model_has_no_more_findings(config: str, changed: str, tmp_path: Path) -> None:
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "1" / "model.py").write_text(PYTHON + "\n# get_response_sender".replace("#", "x."))
    (tmp_path / "m" / "config.pbtxt").write_text(config)
    (line,) = fix(tmp_path, lint(tmp_path))
    assert changed in line
    assert not [finding for finding in lint(tmp_path) if finding.fix is not None or finding.severity is Severity.ERROR]
    assert fix(tmp_path, lint(tmp_path)) == []


def test_fix_removes_all_refused_fields_of_an_ensemble(tmp_path: Path) -> None:
    CASES["whole"].write(tmp_path / "whole")
    (tmp_path / "e" / "1").mkdir(parents=True)
    config = f"{ENSEMBLE}{ON_CPU}{ON_CPU}optimization {{ }}\n"
    (tmp_path / "e" / "config.pbtxt").write_text(config)
    (line,) = fix(tmp_path, lint(tmp_path))
    assert line == "e/config.pbtxt: left out instance_group (TR552), left out optimization (TR552)"
    assert (tmp_path / "e" / "config.pbtxt").read_text() == ENSEMBLE


def test_fix_leaves_a_link_unchanged(tmp_path: Path) -> None:
    CASES["other_name"].write(tmp_path / "r" / "m")
    (tmp_path / "r" / "m" / "config.pbtxt").rename(tmp_path / "r" / "m" / "kept.pbtxt")
    (tmp_path / "r" / "m" / "config.pbtxt").symlink_to("kept.pbtxt")
    (line,) = fix(tmp_path / "r", lint(tmp_path / "r"))
    assert "it is a link" in line
    assert 'name: "another"' in (tmp_path / "r" / "m" / "kept.pbtxt").read_text()


def test_check_fix_reports_its_changes_and_the_other_findings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    CASES["onnx_spinning"].write(tmp_path / "m")
    config = tmp_path / "m" / "config.pbtxt"
    config.write_text(config.read_text() + parameter("arena", "1") + 'name: "n"\n')
    assert main(["check", str(tmp_path)]) == 1
    assert 'name: "n"' in config.read_text(), "nothing is changed without --fix"
    assert main(["check", str(tmp_path), "--fix"]) == 0
    output = capsys.readouterr().err
    assert 'wrote name: "m" (TR105), left out parameters[arena] (TR603), left out parameters[spin] (TR603)' in output
    whole = CASES["onnx"].config
    assert isinstance(whole, str)
    assert config.read_text() == whole + 'name: "m"\n'
