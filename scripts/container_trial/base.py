"""Base images, made once and kept: a Python image and a stand-in of NVIDIA's image of Triton.

NVIDIA's image is not used. The stand-in is a Debian (or Ubuntu) by debootstrap with the embedded server's files in
/opt/tritonserver, its Python backend, and the C++ backends of a folder that the caller names.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from builder.repository.config.arguments import USER
from builder.serving.server.embedded import EMBEDDED, wheel_folder
from scripts.container_trial.engine import NAME, Engine, TrialError

PYTHONS = {"bookworm": "3.11", "noble": "3.12"}  # Python of a suite: the emitted packages need 3.11 or 3.12
PACKAGES = ("python3", "python3-pip", "python-is-python3", "curl", "ca-certificates")
SETTINGS = "PIP_BREAK_SYSTEM_PACKAGES=1"  # Debian's Python refuses pip, that of the stock images does not
BOOTSTRAP_TIMEOUT_S = 1200
SERVER = Path("/opt/tritonserver")


def suite_of_machine() -> str:
    """Return the machine's own suite if its Python fits, else Debian 12's."""
    lines = Path("/etc/os-release").read_text("utf-8").splitlines()
    codename = dict(line.split("=", 1) for line in lines if "=" in line).get("VERSION_CODENAME", "").strip('"')
    return codename if codename in PYTHONS else "bookworm"


@dataclass(frozen=True)
class Base:
    """Names of the images of Python and of the stand-in."""

    python: str
    server: str
    suite: str

    def __str__(self) -> str:
        return (
            f"a stand-in of NVIDIA's image: {self.suite}, Python {PYTHONS[self.suite]} and the embedded Triton "
            f"{EMBEDDED} in {SERVER}"
        )


def make_base(engine: Engine, suite: str, backends: Path | None) -> Base:
    """Return the base images, which are made unless they are there. Raises TrialError."""
    python, server = f"{NAME}/python:{suite}", f"{NAME}/tritonserver-stand-in:{_key(suite, backends)}"
    if not engine.has_image(python):
        _bootstrap(engine, suite, python)
    if not engine.has_image(server):
        with tempfile.TemporaryDirectory() as folder:
            _copy_server(Path(folder), PYTHONS[suite], backends)
            engine.run("buildah", "bud", "--isolation", "chroot", "--from", python, "--tag", server, folder)
    return Base(python, server, suite)


def _key(suite: str, backends: Path | None) -> str:
    files = sorted(backends.glob("*/*")) if backends else []
    said = [suite, version("nvidia-pytriton"), *(f"{file} {file.stat().st_size}" for file in files), _containerfile()]
    return hashlib.sha256("\n".join(said).encode()).hexdigest()[:12]


def _bootstrap(engine: Engine, suite: str, image: str) -> None:
    packages = ",".join([*PACKAGES, f"libpython{PYTHONS[suite]}"])
    engine.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=engine.folder) as scratch:
        root, tarball = Path(scratch) / "root", Path(scratch) / "root.tar"
        include = [f"--include={packages}", "--components=main,universe" if suite == "noble" else "--components=main"]
        command = ["debootstrap", "--variant=minbase", *include, suite, str(root), *_mirror(suite)]
        engine.run(*command, timeout=BOOTSTRAP_TIMEOUT_S)
        shutil.rmtree(root / "var/cache/apt/archives", ignore_errors=True)
        engine.run("tar", "--create", "--file", tarball, "--directory", root, ".")
        engine.podman("import", "--change", f"ENV {SETTINGS}", tarball, image)


def _mirror(suite: str) -> list[str]:
    """Return the mirror of `suite` that the machine's apt uses; debootstrap has one of its own."""
    command = ["apt-get", "indextargets", "--format", "$(SITE)", "Codename: " + suite, "Created-By: Packages"]
    sites = subprocess.run(command, capture_output=True, text=True, check=False).stdout.split()
    return sites[:1]


def _copy_server(folder: Path, python: str, backends: Path | None) -> None:
    """Write a Containerfile and the files of the stand-in, as NVIDIA's image lays them out."""
    wheel, target = wheel_folder(), folder / "tritonserver"
    for part in ("bin", "caches"):
        shutil.copytree(wheel / part, target / part)
    shutil.copytree(wheel / "backends" / "python", target / "backends" / "python")
    stub = wheel / "python_backend_stubs" / python / "triton_python_backend_stub"
    if not stub.is_file():
        raise TrialError(f"the embedded Triton has no Python backend for Python {python}")
    shutil.copy(stub, target / "backends" / "python")
    shutil.copytree(wheel.parent.parent / "nvidia_pytriton.libs", target / "lib")
    for backend in sorted(backends.iterdir()) if backends else []:
        shutil.copytree(backend, target / "backends" / backend.name)
    (folder / "Containerfile").write_text(_containerfile(), "utf-8")


def _containerfile() -> str:
    return "\n".join(
        [
            "FROM scratch",
            f"COPY tritonserver {SERVER}",
            f"ENV PATH={SERVER}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            f"ENV LD_LIBRARY_PATH={SERVER}/lib",
            f"RUN useradd --uid {USER} --create-home triton-server",
            "",
        ]
    )
