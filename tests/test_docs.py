"""README.md and docs/: commands, examples, paths, links, and the site built from them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from pydantic import BaseModel

import builder
from builder.commands import VERBS
from builder.common.errors import SpecError
from builder.options import BuildSpec, PodOptions
from scripts.documentation.pages import pages, rendered
from tests.documents import (
    ROOT,
    blocks,
    check_command,
    check_inline,
    check_python,
    check_yaml,
    commands,
    inline_code,
)

PAGES = {str(path.relative_to(ROOT)): path.read_text("utf-8") for path in [*pages(), ROOT / "SECURITY.md"]}
README = PAGES["README.md"]
PATH = re.compile(r"(builder|docs|scripts|templates|tests|\.ci)(/[\w.-]+)+/?|[\w-]+\.(md|toml|txt|yml)")
WRITTEN_BY_USERS = {"texts.txt", "keys.txt", "engine.toml", "backend.toml", "config.json", "model.safetensors"}


@pytest.mark.parametrize("page", PAGES)
def test_generated_parts_are_up_to_date(page: str) -> None:
    assert rendered(PAGES[page]) == PAGES[page], "run scripts/docs"


def test_readme_is_at_most_8_kib() -> None:
    assert len(README.encode()) <= 8192


@pytest.mark.parametrize("page", PAGES)
def test_documented_commands_are_valid(page: str) -> None:
    for language, _, text in blocks(PAGES[page]):
        if language == "bash":
            for words in commands(text):
                check_command(words)
    for code in inline_code(PAGES[page]):
        check_inline(code)


@pytest.mark.parametrize("page", PAGES)
def test_no_block_asks_a_server_that_its_terminal_runs(page: str) -> None:
    """Regression: `serve` ends with the server, so the lines after it in thirteen guides never ran."""
    for language, _, text in blocks(PAGES[page]):
        lines = text.splitlines() if language == "bash" else []
        served = next((at for at, line in enumerate(lines) if re.match("build-repo (serve|gateway)", line)), len(lines))
        asking = [
            line for line in lines[served:] if re.match("curl|build-repo (query|evaluate|load-test|promote)", line)
        ]
        assert not asking, "write them in a block of their own, after: From another terminal:"


@pytest.mark.parametrize(
    "command",
    [
        "biuld-repo org/model",
        "build-repo org/model --precison int8",
        "build-repo org/model --precision int7",
        "build-repo org/model --level O4 --precision int8",
        "build-repo serv",
        "build-repo serve --grcp-port 9001",
        "build-repo query minilm txt_input=hello",
        "scripts/tset",
        "scripts/test tests/no_such_folder",
        "scripts/bench encodings",
        "scripts/bench encoders --round 2",
        "scripts/docs --chek",
        "docker compose --profile cup up",
        "docker compose run --rm compiler",
        "curl localhost:8001/v2/models/minilm/generate",
        "curl localhost:8000/v2/model/minilm/generate",
        """curl localhost:8000/v2/models/m/generate -d '{"text_input": "x", "max_token": 9}'""",
        "pip install --constraint constraint.txt .",
        "pip install '.[gpus]'",
        "pip install 'triton-model-repository-builder[gpus]'",
    ],
)
def test_check_command_refuses_a_misspelt_command(command: str) -> None:
    (words,) = commands(command)
    with pytest.raises(AssertionError):
        check_command(words)


@pytest.mark.parametrize("code", ["--instanses 2", "--precision int3", "build-repo chek", "scripts/docs --chek"])
def test_check_inline_refuses_a_misspelt_option(code: str) -> None:
    with pytest.raises(AssertionError):
        check_inline(code)


def test_inline_code_is_found_in_running_text() -> None:
    assert inline_code("See `build-repo\ncheck`,\n```bash\n`not this`\n```\nand `--name`.") == [
        "build-repo check",
        "--name",
    ]


def test_documentation_shows_every_verb() -> None:
    shown = {words[1] for text in PAGES.values() for _, _, block in blocks(text) for words in _build_repo(block)}
    assert set(VERBS) - shown == set(), "show them in a bash block of docs/guides"


def _build_repo(block: str) -> list[list[str]]:
    return [line.split() for line in block.splitlines() if line.startswith("build-repo ")]


@pytest.mark.parametrize("page", PAGES)
def test_documented_examples_are_valid(page: str, tmp_path: Path) -> None:
    for language, title, text in blocks(PAGES[page]):
        assert language in ("bash", "text", "yaml", "json", "python", "dockerfile"), f"a block of {language!r}"
        if language == "yaml":
            check_yaml(title, text, tmp_path)
        elif language == "python":
            check_python(text)
        elif language == "dockerfile":
            for source in re.findall(r"^COPY (\S+)", text, re.MULTILINE):
                assert (ROOT / source).exists()


def test_check_yaml_and_check_python_refuse_invalid_examples(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="did you mean 'precision'"):
        check_yaml('title="models.yaml"', "models: [{model: a/b, precison: int8}]", tmp_path)
    with pytest.raises(AssertionError, match="has no buildd"):
        check_python("from builder.building.pipeline import buildd")
    with pytest.raises(SyntaxError):
        check_python("print(")


@pytest.mark.parametrize("page", PAGES)
def test_paths_in_pages_exist(page: str) -> None:
    for code in inline_code(PAGES[page]):
        name = code.split()[0]
        if PATH.fullmatch(name) and "my_" not in name and name not in WRITTEN_BY_USERS:
            assert (ROOT / name).exists(), f"{name} does not exist"


def test_documented_project_tree_matches_the_files() -> None:
    tree = (
        PAGES["docs/explanation/architecture.md"].split("## Where things are")[1].split("```text\n")[1].split("```")[0]
    )
    folders: list[str] = []
    shown = set()
    for line in tree.splitlines():
        match = re.match(r"( *)([\w.,/ -]+?)  +.*$", line)
        assert match, line
        depth = len(match[1]) // 2
        names = match[2].split(", ")
        for name in names:
            path = ROOT.joinpath(*folders[:depth], name)
            assert path.exists(), f"{path} of the tree"
            shown.add(path)
        folders[depth:] = [names[0]]
    there = {path for path in (ROOT / "builder").iterdir() if path.is_dir() or path.suffix == ".py"}
    assert {path.name for path in there - shown} <= {"__init__.py", "__pycache__"}, "not in the tree"


def test_documented_python_names_can_be_imported() -> None:
    page = PAGES["docs/reference/python.md"]
    elsewhere = set(re.findall(r"`(\w+)`", page.split("except", 1)[1].split("Importing", 1)[0]))
    described = {path.rpartition(".")[2] for path in re.findall(r"^::: (\S+)$", page, re.MULTILINE)} - {"errors"}
    assert described - elsewhere == set(builder.__all__) & described, "from builder"
    assert elsewhere <= described


def test_links_to_files_outside_the_site_exist() -> None:
    """Links between pages are checked by mkdocs."""
    for page in ("README.md", "SECURITY.md", "CHANGELOG.md"):
        for target in re.findall(r"\]\(([^)\s]+)\)", (ROOT / page).read_text("utf-8")):
            if not target.startswith("https://"):
                assert (ROOT / target.split("#")[0]).exists(), f"{page}: {target}"


def test_configuration_reference_describes_every_key() -> None:
    groups: list[type[BaseModel]] = [BuildSpec, PodOptions]
    for group in groups:
        for name, field in group.model_fields.items():
            assert field.description, f"{group.__name__}.{name} has no docstring"
            inner = [field.annotation, *getattr(field.annotation, "__args__", ())]
            groups += [part for part in inner if isinstance(part, type) and issubclass(part, BaseModel)]
    assert len(groups) > 5


def test_picture_has_a_title_and_is_self_contained() -> None:
    picture = ElementTree.parse(ROOT / "docs" / "images" / "data-flow.svg").getroot()
    space = "{http://www.w3.org/2000/svg}"
    assert picture.find(f"{space}title") is not None
    assert {element.tag for element in picture.iter()}.isdisjoint({f"{space}{t}" for t in ("script", "image", "style")})


class _Fetches(HTMLParser):
    """Resources that a browser loads for a page."""

    def __init__(self) -> None:
        super().__init__()
        self.sources: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        if tag in ("script", "img", "iframe", "source"):
            self.sources.append(attributes.get("src") or "")
        elif tag == "link" and attributes.get("rel") not in ("canonical", "prev", "next"):
            self.sources.append(attributes.get("href") or "")


def test_site_builds_strictly_and_fetches_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    built = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    )
    assert built.returncode == 0, built.stdout + built.stderr
    pages = sorted(tmp_path.rglob("*.html"))
    assert {path.stem for path in pages} >= {Path(page).stem for page in PAGES if page.startswith("docs/")}
    for path in pages:
        reader = _Fetches()
        reader.feed(path.read_text("utf-8"))
        assert not [source for source in reader.sources if re.match(r"(https?:)?//", source)], path.name
    for path in tmp_path.rglob("*.css"):
        assert not re.search(r"url\(['\"]?(https?:)?//|@import", path.read_text("utf-8")), path.name
