"""Build the project's Dockerfiles on the base images, with the settings of this machine's pip."""

from __future__ import annotations

import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from scripts.container_trial.base import Base
from scripts.container_trial.engine import NAME, TRIAL, Engine

ROOT = Path(__file__).parents[2]
TRITON, GATEWAY, PULL = (f"{NAME}/{kind}:{TRIAL}" for kind in ("triton", "gateway", "pull"))
PIP_SETTINGS = ("cert", "index-url", "proxy", "trusted-host")  # with which this machine reaches an index


def build_images(engine: Engine, base: Base) -> str:
    """Build the images of Triton, the gateway and the pull, and return their sizes. Raises TrialError."""
    with tempfile.TemporaryDirectory() as folder:
        mounts = _pip_mounts(Path(folder))
        for file, parent, image in (
            ("Dockerfile", base.server, TRITON),
            ("Dockerfile.gateway", base.python, GATEWAY),
            ("Dockerfile.pull", base.python, PULL),
        ):
            command = ["buildah", "bud", "--isolation", "chroot", "--from", parent, *mounts]
            engine.run(*command, "--file", ROOT / file, "--tag", image, ROOT)
    listed = engine.podman("images", "--format", "{{.Repository}}:{{.Tag}} {{.Size}}").splitlines()
    return ", ".join(line.removeprefix(f"{NAME}/") for line in sorted(listed) if f":{TRIAL} " in line)


def _pip_mounts(folder: Path) -> list[str]:
    """Write this machine's settings of pip to `folder`; return options that mount them, so that no image has them."""
    listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True)
    lines = [shlex.split(line)[0].partition("=") for line in listed.stdout.splitlines()]
    said = {name.rpartition(".")[2]: value for name, _, value in lines}  # the environment's come last
    settings = {name: said[name] for name in PIP_SETTINGS if name in said}
    (folder / "pip.conf").write_text(
        "".join(["[global]\n", *(f"{name} = {value}\n" for name, value in settings.items())]), "utf-8"
    )
    certificates = [settings["cert"]] if "cert" in settings else []
    files = [(folder / "pip.conf", "/etc/pip.conf"), *((file, file) for file in certificates)]
    return [f"--volume={source}:{target}:ro" for source, target in files]
