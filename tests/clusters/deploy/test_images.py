"""Container images: Triton's in the Pythons of its releases, and those of the gateway and the pull.

The gateway and the pull have the packages that they import, and no more of the project's own requirements. Images are
built if a container engine can fetch their base images.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, distribution, packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from builder.clusters.deploy import image
from builder.clusters.deploy.image import image_files, image_tag
from builder.clusters.deploy.targets import find_target
from builder.common.cache.folder import ENGINES, fetched_folder
from builder.common.releases import RELEASES
from tests.clusters.deploy.deployments import ENCODER, IN_IMAGE, STORED

ROOT = Path(__file__).parents[3]
# Image name: (folder of its requirements, modules that its command imports)
IMAGES = {
    "gateway": (
        "serving/gateway",
        "builder.cli, builder.commands.gateway, builder.serving.gateway.auth, builder.serving.gateway.server",
    ),
    "pull": (
        "repository/stores",
        "builder.cli, builder.commands.pull, builder.repository.stores.transfer, builder.repository.publish",
    ),
}
# Prints the packages that the project's own modules import, without those that packages import themselves.
PROGRAM = """
import builtins, json
found, load = set(), builtins.__import__
def noting(name, globals=None, locals=None, fromlist=(), level=0):
    if not level and str((globals or {{}}).get("__name__")).startswith("builder"):
        found.add(name.split(".")[0])
    return load(name, globals, locals, fromlist, level)
builtins.__import__ = noting
import {}
print(json.dumps(sorted(found)))
"""


def _requirements(image: str) -> list[str]:
    text = (ROOT / "builder" / IMAGES[image][0] / "requirements.txt").read_text()
    return [line for line in text.splitlines() if not line.startswith("#")]


def _closure(lines: list[str]) -> set[str]:
    """Return the distributions that these requirements install, with those dependencies that are installed here."""
    closure: set[str] = set()
    waiting = [Requirement(line) for line in lines]
    while waiting:
        requirement = waiting.pop()
        key = f"{canonicalize_name(requirement.name)}[{','.join(sorted(requirement.extras))}]"
        if key in closure:
            continue
        closure |= {key, canonicalize_name(requirement.name)}
        try:
            needed = [Requirement(text) for text in distribution(requirement.name).requires or ()]
        except PackageNotFoundError:
            continue  # the client of an object store that is not tested here
        extras = requirement.extras or {""}
        waiting += [r for r in needed if r.marker is None or any(r.marker.evaluate({"extra": e}) for e in extras)]
    return closure


@pytest.mark.parametrize("image", IMAGES)
def test_image_has_every_package_that_its_command_imports(image: str) -> None:
    command = [sys.executable, "-c", PROGRAM.format(IMAGES[image][1])]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT)
    imported = {name for name in json.loads(done.stdout) if name not in sys.stdlib_module_names}
    owners = packages_distributions()
    there = _closure(_requirements(image))
    for name in sorted(imported - {"builder"}):
        brought = {canonicalize_name(owner) for owner in owners.get(name, ())}
        assert not brought or brought & there, f"{image} imports {name}, which its image does not have"
    assert "torch" not in imported


def test_pull_image_has_the_packages_of_the_verifier() -> None:
    """The verifier is imported when a key is given, so the imports of the command do not show it."""
    assert {"model-signing", "pyopenssl"} <= _closure(_requirements("pull"))


def test_pull_image_has_the_package_versions_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [
        *project["dependencies"],
        *(line for e in ("s3", "gcs", "azure", "sign", "openvino") for line in project["optional-dependencies"][e]),
    ]
    assert set(_requirements("pull")) <= set(lines)
    dockerfile = (ROOT / "Dockerfile.pull").read_text()
    for source in re.findall(r"^COPY (.*) \S+$", dockerfile, re.MULTILINE):
        assert all((ROOT / name).exists() for name in source.split())
    assert 'ENTRYPOINT ["build-repo", "pull"]' in dockerfile
    assert "USER 1000:1000" in dockerfile


@pytest.mark.slow
@pytest.mark.parametrize("release", ["24.10", "26.08"])
def test_triton_image_step_installs_every_requirement(release: str, tmp_path: Path) -> None:
    """Run the Containerfile's step if scripts/pythons has created an environment with the Python of that release."""
    version = RELEASES[release].python
    python = fetched_folder(ENGINES, f"python-{version}") / "bin" / "python"
    if not python.exists():
        pytest.skip(f"scripts/pythons makes an environment of Python {version} where that is installed")
    written = image_files(replace(STORED, models=(replace(ENCODER, release=release),)))
    (tmp_path / "requirements.txt").write_text(written["image/requirements.txt"])
    (step,) = re.findall(r"^RUN pip (.*) \\$", written["image/Containerfile"], re.MULTILINE)
    options = shlex.split(step.replace("/opt", str(tmp_path)))
    command = [str(python), "-m", "pip", *options, "--dry-run", "--no-index", "--disable-pip-version-check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr
    assert "Would install" not in done.stdout


def test_image_tag_changes_with_its_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes that have an image of that tag do not pull it again."""
    before = image_tag(STORED)
    monkeypatch.setattr(image, "requirements", lambda _: "numpy==1.26.4\n")
    assert image_tag(STORED) != before


@pytest.mark.parametrize("target", ["kubernetes", "helm", "kserve"])
def test_steps_push_the_image_before_they_apply_the_manifests(target: str) -> None:
    *own, build, push, apply = find_target(target).steps(IN_IMAGE, Path("out"))
    assert [step.split("#")[0].split()[1] for step in own] == (["build", "push"] if target != "kserve" else [])
    name = f"registry.example/models-triton:{image_tag(IN_IMAGE)}"
    assert f"--tag {name} " in build
    assert push == f"docker push {name}"
    assert apply.startswith(("kubectl apply", "helm upgrade --install"))


@pytest.mark.parametrize(("target", "kinds"), [("kubernetes", ["gateway", "pull"]), ("kserve", ["pull"])])
def test_steps_build_each_image_that_the_pods_name(target: str, kinds: list[str]) -> None:
    """Regression: from a wheel nothing said where the image of the gateway comes from."""
    written, steps = find_target(target).files(STORED), find_target(target).steps(STORED, Path("out"))
    named = {name for text in written.values() for name in re.findall(r"^ *-? *image: (\S+)$", text, re.MULTILINE)}
    assert named == {step.removeprefix("docker push ") for step in steps if step.startswith("docker push ")}
    built = [re.findall(r"--file \S+/Dockerfile\.(\w+) ", step) for step in steps]
    assert [kind for found in built for kind in found] == kinds


def _engine() -> str:
    """Return a program that builds images and runs here."""
    for name in ("docker", "podman", "buildah"):
        if shutil.which(name) and not subprocess.run([name, "info"], capture_output=True, check=False).returncode:
            return name
    pytest.skip("no engine builds images here: docker, podman or buildah")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("file", ["Dockerfile.gateway", "Dockerfile.pull"])
def test_image_builds_and_prints_its_help(file: str) -> None:
    engine, steps = _engine(), (ROOT / file).read_text()
    (base,) = re.findall(r"^FROM (\S+)", steps, re.MULTILINE)
    if subprocess.run([engine, "pull", base], capture_output=True, check=False).returncode:
        pytest.skip(f"{engine} cannot fetch {base}")
    image = f"localhost/build-repo-test:{file.removeprefix('Dockerfile.')}"
    subprocess.run([engine, "build", "--tag", image, "--file", file, "."], cwd=ROOT, capture_output=True, check=True)
    if engine != "buildah":  # buildah cannot run images
        done = subprocess.run([engine, "run", "--rm", image, "--help"], capture_output=True, text=True, check=True)
        assert "usage: build-repo" in done.stdout


def _image(kind: str) -> tuple[Path, dict[str, str]]:
    """Return the Python of an image's environment, and environment variables that make the project importable."""
    python = fetched_folder(ENGINES, f"image-{kind}") / "bin" / "python"
    if not python.exists():
        pytest.skip("scripts/pythons makes the environments of the images, where Python 3.12 is installed")
    return python, {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)}


@pytest.mark.slow
def test_pull_runs_with_the_packages_of_its_image(store: str, tmp_path: Path) -> None:
    python, environment = _image("stores")
    program = "import sys; from builder.cli import main; sys.exit(main())"
    target = tmp_path / "pulled" / "models"
    pull = [str(python), "-c", program, "pull", "minilm@2", "writes", f"--from={store}", f"--repository={target}"]
    subprocess.run(pull, check=True, env=environment, capture_output=True)
    assert (target / "minilm" / "2" / "model.py").is_file()
    assert (target / "writes" / "1" / "model.py").is_file()


@pytest.mark.slow
def test_gateway_imports_with_the_packages_of_its_image() -> None:
    python, environment = _image("gateway")
    subprocess.run([python, "-c", f"import {IMAGES['gateway'][1]}"], check=True, env=environment, capture_output=True)
