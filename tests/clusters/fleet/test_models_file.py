"""models.yaml with includes, patterns and matrices: its entries, and the errors of invalid ones."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from builder.common.errors import SpecError
from builder.options import load_entries, load_specs
from builder.serving.tune.winner import write_settings


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder that paths of files and checkpoints are relative to."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _write(folder: Path, text: str, name: str = "models.yaml") -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def _names(path: Path) -> list[str]:
    return [spec.entry_name for spec in load_specs(path)]


def test_matrix_yields_one_model_per_combination(folder: Path) -> None:
    path = _write(
        folder, "models: [{model: a/b, matrix: {precision: [fp32, int8], serving.token_budget: [512, 1024]}}]"
    )
    specs = load_specs(path)
    assert [(s.entry_name, s.precision, s.serving.token_budget) for s in specs] == [
        ("b-fp32-512", "fp32", 512),
        ("b-fp32-1024", "fp32", 1024),
        ("b-int8-512", "int8", 512),
        ("b-int8-1024", "int8", 1024),
    ]


def test_matrix_name_template_names_each_model(folder: Path) -> None:
    entry = "model: [a/one, a/two], truncate: [true, false]"
    assert _names(_write(folder, f"models: [{{name: '{{truncate}}.{{model}}', matrix: {{{entry}}}}}]")) == [
        "true.one",
        "false.one",
        "true.two",
        "false.two",
    ]


def test_pattern_yields_one_model_per_matching_folder(folder: Path) -> None:
    for name in ("news", "mail"):
        (folder / "checkpoints" / name).mkdir(parents=True)
    (folder / "checkpoints" / "readme.md").touch()
    path = _write(folder, "models: [{model: checkpoints/*, matrix: {precision: [fp32, int8]}}]")
    assert [(s.model, s.entry_name) for s in load_specs(path)] == [
        ("checkpoints/mail", "mail-fp32"),
        ("checkpoints/news", "news-fp32"),
        ("checkpoints/mail", "mail-int8"),
        ("checkpoints/news", "news-int8"),
    ]
    path = _write(folder, "models: [{model: checkpoints/*, name: 'team.{model}'}]")
    assert _names(path) == ["team.mail", "team.news"]


def test_included_files_inherit_defaults_below_their_own(folder: Path) -> None:
    _write(folder, "defaults: {keep: 3}\nmodels: [{model: a/search}]", "teams/search.yaml")
    _write(folder, "models: [{model: a/mail, precision: fp32}]", "teams/mail.yaml")
    path = _write(folder, "defaults: {precision: int8, keep: 5}\ninclude: [teams/*.yaml]\nmodels: [{model: a/own}]")
    assert [(s.entry_name, s.precision, s.keep) for s in load_specs(path)] == [
        ("own", "int8", 5),
        ("mail", "fp32", 5),
        ("search", "int8", 3),
    ]
    assert [str(entry.origin) for entry in load_entries(path)][1:] == [
        str(folder / "teams/mail.yaml:1"),
        str(folder / "teams/search.yaml:2"),
    ]
    assert _names(_write(folder, "include: teams/mail.yaml", "only.yaml")) == ["mail"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "models:\n  - {model: a/b}\n  - {model: a/c, precison: int8}",
            "models.yaml:3: a/c: unknown key 'precison'; did",
        ),
        ("models: [{model: a/b, matrix: {precison: [int8]}}]", "unknown key 'precison'; did you mean 'precision'?"),
        ("models: [{model: a/b, matrix: {precision: [int3]}}]", "models.yaml:1: a/b: precision: Input should be"),
        ("models: [{model: a/b, matrix: {precision: int8}}]", "matrix.precision: expected a list of texts and numbers"),
        ("models: [{model: a/b, matrix: {precision: []}}]", "matrix.precision: expected a list of texts and numbers"),
        ("models: [{model: a/b, matrix: [precision]}]", "models.yaml:1: `matrix`: expected a mapping"),
        ("models: [{model: a/b, matrix: {name: [a, b]}}]", "matrix.name: names come of the other options"),
        (
            "models: [{model: a/b, name: 'x-{engine}', matrix: {precision: [int8]}}]",
            "has {engine}; there are {precision}",
        ),
        ("models: [{model: nothing/*}]", "models.yaml:1: no folder is called nothing/*"),
        ("models: [7]", "models.yaml:1: each of `models`: expected a mapping of options; found 7"),
        ("defaults: [7]\nmodels: [{model: a/b}]", "models.yaml: `defaults`: expected a mapping of options"),
        ("include: none/*.yaml", "include: no file is called none/*.yaml"),
        ("include: none.yaml", "none.yaml cannot be read (No such file or directory)"),
        ("include: {a: b}", "`include` is a path, or a list of them"),
        ("include: models.yaml", "models.yaml includes itself"),
        ("include: []", "expected a mapping with a list `models`"),
        ("models:\n  - {model: a/b}\n  - {model: c/b}", "models.yaml:3: the name 'b' is used twice, first at "),
    ],
)
def test_models_file_errors_name_their_place(text: str, message: str, folder: Path) -> None:
    with pytest.raises(SpecError, match=re.escape(message)):
        load_specs(_write(folder, text))


def test_models_file_reports_five_errors_and_counts_the_rest(folder: Path) -> None:
    entries = "\n".join(f"  - {{model: a/m{number}, level: O9}}" for number in range(8))
    with pytest.raises(SpecError) as error:
        load_specs(_write(folder, f"models:\n{entries}"))
    lines = str(error.value).splitlines()
    assert [line.split(": ")[1] for line in lines[:-1]] == [f"a/m{number}" for number in range(5)]
    assert lines[-1] == "and 3 more"


def test_write_settings_requires_an_entry_of_one_model(folder: Path) -> None:
    _write(folder, "models: [{model: a/included}]", "other.yaml")
    text = "include: other.yaml\nmodels:\n  - {model: a/b, matrix: {precision: [fp32, int8]}}\n  - model: a/alone\n"
    path = _write(folder, text)
    for name, where in (("b-int8", "models.yaml:3"), ("included", "other.yaml:1")):
        with pytest.raises(SpecError, match=rf"{name} is made of .*{where}.*give it an entry of its own"):
            write_settings(path, name, {"instances": 2}, "because")
    write_settings(path, "alone", {"instances": 1}, "because")
    assert [spec.entry_name for spec in load_specs(path)] == ["b-fp32", "b-int8", "alone", "included"]
