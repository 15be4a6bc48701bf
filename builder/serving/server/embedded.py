"""Locate the tritonserver in the nvidia-pytriton wheel, and build the command that starts it.

The backends and the Python that it needs go to a folder of their own. Knows files; starts nothing.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import site
import sys
import sysconfig
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from builder.common.errors import ServeError
from builder.repository.config.arguments import RESPONSE_CACHE, RESTRICTED
from builder.repository.liveness import put_liveness
from builder.serving.server.stubs import REGION

EMBEDDED = "24.10"  # release of the server, 2.51, in the nvidia-pytriton wheel
GATEWAY_PREFIX = "BUILD_REPO_GATEWAY_"  # of the variables that have secrets of the gateway
BACKENDS = Path(__file__).parent / "backends"


@dataclass(frozen=True)
class EmbeddedCommand:
    """Command and environment of the server, without its addresses and models.

    `region`: prefix of the names of its shared memory regions.
    """

    command: Sequence[str]
    environment: Mapping[str, str]
    region: str


def wheel_folder() -> Path:
    """Return the folder of tritonserver in the nvidia-pytriton wheel. Raises ServeError if it is missing."""
    spec = importlib.util.find_spec("pytriton")
    folder = Path(spec.origin).parent / "tritonserver" if spec is not None and spec.origin else None
    if folder is None or not (folder / "bin" / "tritonserver").is_file():
        raise ServeError(
            f"no tritonserver for {sys.platform}: the nvidia-pytriton wheel, which carries it, exists for Linux x86-64 "
            "and arm64. Use the container instead: docker compose --profile cpu up"
        )
    return folder


def prepare_embedded(repository: Path, scratch: Path, beside: Path, liveness: bool = False) -> EmbeddedCommand:
    """Return the server on `repository`, with the backends in `beside`; `scratch`: a folder for the files it needs.

    `liveness`: add the repository of the liveness model.
    Raises ServeError if there is none for this machine or this Python.
    """
    wheel = wheel_folder()
    backends = scratch / "backends"
    for source in [*(wheel / "backends" / "python").iterdir(), find_stub(wheel)]:
        if source.is_file():
            _copy(source, backends / "python" / source.name)
    for source in beside.glob("*/*"):
        if source.is_file():
            _copy(source, backends / source.parent.name / source.name)
    region = f"{REGION}{uuid.uuid4().hex[:12]}_"
    libraries = wheel.parent.parent / "nvidia_pytriton.libs"
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(GATEWAY_PREFIX)},
        "PATH": f"{_interpreter(scratch) / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}",
        "LD_LIBRARY_PATH": f"{libraries}{os.pathsep}{os.environ.get('LD_LIBRARY_PATH', '')}",
        "TOKENIZERS_PARALLELISM": "true",
    }
    repositories = [_plain_path(repository.resolve(), scratch)]
    if liveness:
        repositories.append(put_liveness(scratch / "liveness"))
    command = [
        str(wheel / "bin" / "tritonserver"),
        *(f"--model-repository={folder}" for folder in repositories),
        f"--backend-directory={backends}",
        f"--backend-config=python,shm-region-prefix-name={region}",
        f"--cache-directory={wheel / 'caches'}",
        f"--cache-config=local,size={RESPONSE_CACHE}",
        "--disable-auto-complete-config",
        *(
            f"--{option}={RESTRICTED}:key={uuid.uuid4()}"
            for option in ("grpc-restricted-protocol", "http-restricted-api")
        ),
    ]
    return EmbeddedCommand(command, environment, region)


def find_stub(wheel: Path) -> Path:
    """Return the file of `wheel` that runs models in this Python. Raises ServeError if there is none."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    stub = wheel / "python_backend_stubs" / version / "triton_python_backend_stub"
    if not stub.is_file():
        raise ServeError(f"this Triton has no Python backend for Python {version}; use Python 3.11 or 3.12")
    return stub


def _interpreter(scratch: Path) -> Path:
    """Create a virtual environment of this interpreter and its packages that writes no bytecode.

    A served repository therefore stays byte for byte as published. The stub's Python reads no environment variable; the
    first python3 on PATH configures it (PEP 405).
    """
    folder = scratch / "python"
    packages = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder)}))
    packages.mkdir(parents=True)
    (folder / "bin").mkdir()
    (folder / "bin" / "python3").symlink_to(os.path.realpath(sys.executable))
    (folder / "pyvenv.cfg").write_text(f"home = {Path(sys.base_prefix) / 'bin'}\n", "utf-8")
    lines = ["import sys; sys.dont_write_bytecode = True"]
    lines += [f"import site; site.addsitedir({path!r})" for path in site.getsitepackages()]
    (packages / "builder.pth").write_text("\n".join(lines), "utf-8")
    return folder


def _plain_path(repository: Path, scratch: Path) -> Path:
    """Return the repository, or a link to it if its path has characters that break Triton's launch of Python."""
    if re.fullmatch(r"[\w./+=@~:-]+", str(repository)):
        return repository
    link = scratch / "model_repository"
    link.symlink_to(repository)
    return link


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(source, target)  # not a link: Triton refuses a library that links out of its folder
