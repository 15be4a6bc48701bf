"""A release: the wheel's files, the changelog, provenance, the workflows."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from email.parser import Parser
from importlib.resources import files
from pathlib import Path

import check_jsonschema
import jsonschema
import pytest
import yaml

from builder.common.distribution import sources_folder
from scripts import releasing
from scripts.new_user import Trial

ROOT = Path(__file__).parent.parent
# Files of the wheel besides Python modules. A new one belongs here, so that nothing is shipped or left out unnoticed.
DATA = [
    "builder/common/releases.toml",
    "builder/engines/cuda/cuda_kernels.json",
    "builder/engines/cuda/engine.toml",
    "builder/engines/numpy/engine.toml",
    "builder/engines/onnxruntime/backend.toml",
    "builder/engines/onnxruntime/engine.toml",
    "builder/engines/openvino/backend.toml",
    "builder/engines/openvino/engine.toml",
    "builder/engines/tensorrt/engine.toml",
    "builder/engines/tensorrt_llm/engine.toml",
    "builder/engines/vllm/arguments.toml",
    "builder/engines/vllm/engine.toml",
    "builder/py.typed",
    "builder/repository/liveness/repository/build_repo_liveness/config.pbtxt",
    "builder/repository/stores/requirements.txt",
    "builder/runtime/requirements-gpu.txt",
    "builder/runtime/requirements.txt",
    "builder/serving/gateway/page.html",
    "builder/serving/gateway/requirements.txt",
    "builder/templates/config.pbtxt.j2",
    "builder/templates/load.html.j2",
    "builder/templates/monitoring/dashboard.json",
    "builder/templates/monitoring/dashboards.yml",
    "builder/templates/monitoring/datasource.yml",
    "builder/templates/monitoring/prometheus.yml",
    "builder/templates/page.css",
    "builder/templates/report.html.j2",
]
EXTRAS = {
    "all",
    "azure",
    "evaluate",
    "gateway",
    "gcs",
    "gpu",
    "limits",
    "openvino",
    "ray",
    "s3",
    "sign",
    "stores",
    "tune",
}
# Reads templates, emits code and lists engines with the wheel's own files; run outside of the checkout.
PROGRAM = """
import sys
sys.path = [sys.argv[1], *(p for p in sys.path if p not in ("", sys.argv[2]))]
from builder.common.distribution import RUNTIME
from builder.common.engines import ENGINES
from builder.repository.config import entries, render
from builder.repository.layout.emitted import emitted_files
from builder.options import Serving
config = entries.Config("m", "python", 1, [], [], [], Serving(), dynamic_batching=True)
assert str(render.templates()).startswith(sys.argv[1]), render.templates()
assert render.parse(render.render(config), "m").name == "m"
models = [path.name for path in RUNTIME.glob("*_model.py")]
assert len(models) == 4
assert all(path.is_file() for model in models for path in emitted_files(model).values())
assert {"onnxruntime", "openvino", "vllm"} <= set(ENGINES)
"""
CHANGELOG = "# Changelog\n\n## [Unreleased]\n\n### Added\n\n- An option.\n\n## [0.4.0] - 2026-01-01\n\n- The rest.\n"


@pytest.fixture(scope="module")
def wheel(module_folder: Callable[[str], Path]) -> Path:
    folder = module_folder("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (path,) = folder.glob("*.whl")
    return path


def test_wheel_has_exactly_these_files(wheel: Path) -> None:
    names = [name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name]
    modules = {path.relative_to(ROOT).as_posix() for path in ROOT.glob("builder/**/*.py")}
    assert sorted(name for name in names if not name.endswith(".py")) == DATA
    assert {name for name in names if name.endswith(".py")} == modules


def test_wheel_says_what_each_extra_needs(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (name,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
    metadata = Parser().parsestr(archive.read(name).decode())
    assert set(metadata.get_all("Provides-Extra") or ()) >= EXTRAS
    base = [line for line in metadata.get_all("Requires-Dist") or () if "extra ==" not in line]
    assert not [line for line in base if line.startswith(("openvino", "starlette", "s3fs", "ray"))]
    assert any(line.startswith("onnxruntime<") for line in base)


def test_source_distribution_has_what_images_are_built_from(module_folder: Callable[[str], Path]) -> None:
    folder = module_folder("sources")
    build = [sys.executable, "-m", "hatchling", "build", "--target", "sdist", "--directory", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as unpacked:
        names = unpacked.getnames()
    assert archive.name == f"{sources_folder()}.tar.gz"
    for kind in ("gateway", "pull"):
        steps = (ROOT / f"Dockerfile.{kind}").read_text()
        copied = [name for line in re.findall(r"^COPY (.*) \S+$", steps, re.MULTILINE) for name in line.split()]
        for name in (f"Dockerfile.{kind}", *copied):
            path = f"{sources_folder()}/{name}"
            assert path in names or any(one.startswith(f"{path}/") for one in names), path


def test_installed_wheel_finds_its_files(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path / "installed")
    arguments = [sys.executable, "-c", PROGRAM, str(tmp_path / "installed"), str(ROOT)]
    subprocess.run(arguments, cwd=tmp_path, check=True)


def test_new_user_ends_at_the_step_that_fails(tmp_path: Path) -> None:
    trial = Trial("true", tmp_path)
    assert trial.step("says", sys.executable, "-c", "print('fine')") == "fine\n"
    with pytest.raises(SystemExit, match=r"(?s)install: .* failed:\n.*no disk"):
        trial.step("install", sys.executable, "-c", "raise SystemExit('no disk')")
    assert list(trial.seconds) == ["environment", "says", "install"]


def test_release_moves_unreleased_entries_into_a_section() -> None:
    changed = releasing.with_section(CHANGELOG, "0.5.0", "2026-12-01")
    assert "## [Unreleased]\n\n## [0.5.0] - 2026-12-01\n\n### Added\n\n- An option.\n\n## [0.4.0]" in changed
    with pytest.raises(SystemExit, match="no entries under"):
        releasing.with_section(changed, "0.6.0", "2026-12-02")
    with pytest.raises(SystemExit, match=r"has a section 0\.4\.0 already"):
        releasing.with_section(CHANGELOG, "0.4.0", "2026-12-01")


@pytest.mark.parametrize("version", ["0.4.0", "0.3.9", "next"])
def test_release_refuses_a_version_that_is_not_higher(version: str) -> None:
    with pytest.raises(SystemExit, match="is not a version higher than"):
        releasing.with_version('[project]\nversion = "0.4.0"\n', version)


def test_release_writes_the_version() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    assert '\nversion = "99.0.0"\n' in releasing.with_version(project, "99.0.0")


def test_provenance_names_the_commit_and_every_file(tmp_path: Path) -> None:
    (tmp_path / "a.whl").write_bytes(b"wheel")
    statement = json.loads(json.dumps(releasing.provenance(releasing.digests_in(tmp_path), "c0ffee", "2026-12-01")))
    (subject,) = statement["subject"]
    done = subprocess.run(["sha256sum", tmp_path / "a.whl"], capture_output=True, text=True, check=True)
    assert subject == {"name": "a.whl", "digest": {"sha256": done.stdout.split()[0]}}
    assert statement["predicate"]["buildDefinition"]["resolvedDependencies"] == [{"digest": {"gitCommit": "c0ffee"}}]


@pytest.mark.parametrize("path", sorted(ROOT.glob(".github/workflows/*.yml")), ids=lambda path: path.name)
def test_workflow_is_valid_and_runs_the_projects_scripts(path: Path) -> None:
    schema = files(check_jsonschema) / "builtin_schemas" / "vendor" / "github-workflows.json"
    workflow = {("on" if key is True else key): value for key, value in yaml.safe_load(path.read_text()).items()}
    jsonschema.validate(workflow, json.loads(schema.read_text()))
    runs = [step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]
    words = [[word for word in shlex.split(run) if word not in ("sudo", "env") and "=" not in word] for run in runs]
    programs = [first for first, *_ in words]
    assert all(program in ("gh", "apt-get") or (ROOT / program).is_file() for program in programs)
    assert any(program.startswith("scripts/") for program in programs)
