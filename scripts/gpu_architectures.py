"""Compute capabilities that the CUDA kernels in wheels of onnxruntime-gpu are compiled for: for releases.toml.

python -m scripts.gpu_architectures WHEEL ...

A library has its kernels in the ELF section .nv_fatbin, as containers of images: machine code for one capability, or
PTX that a driver compiles for it and later ones. NVIDIA documents the headers in no specification; their fields are
those that `cuobjdump --list-elf` prints. Needs readelf.
"""

from __future__ import annotations

import re
import struct
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

CONTAINER = struct.Struct("<IHHQ")  # magic number, version, size of this header, size of all images
IMAGE = struct.Struct("<HHIQ12xI")  # kind, version, size of this header, size of the image; its capability
MAGIC, PTX = 0xBA55ED50, 1
LIBRARY = "onnxruntime/capi/libonnxruntime_providers_cuda.so"


def main() -> None:
    for wheel in sys.argv[1:]:
        with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(wheel) as archive:
            images = images_in(_section(Path(archive.extract(LIBRARY, folder))))
        compiled = sorted({capability for kind, capability in images if kind != PTX})
        ptx = sorted({capability for kind, capability in images if kind == PTX})
        print(f"{Path(wheel).name}: kernels {_versions(compiled)}, ptx {_versions(ptx)}")


def images_in(section: bytes) -> set[tuple[int, int]]:
    """Return the kinds of images in a section .nv_fatbin, each with its compute capability times ten."""
    found, start = set(), 0
    while start + CONTAINER.size <= len(section):
        magic, _, header, size = CONTAINER.unpack_from(section, start)
        if magic != MAGIC:  # padding
            start += 8
            continue
        place, start = start + header, start + header + size
        while place < start:
            kind, _, header, size, capability = IMAGE.unpack_from(section, place)
            found.add((kind, capability))
            place += header + size
    return found


def _section(library: Path) -> bytes:
    headers = subprocess.run(["readelf", "-SW", library], capture_output=True, text=True, check=True).stdout
    match = re.search(r"\.nv_fatbin\s+\w+\s+\w+\s+(\w+)\s+(\w+)", headers)
    if match is None:
        raise SystemExit(f"{library.name} has no section .nv_fatbin")
    with library.open("rb") as file:
        file.seek(int(match[1], 16))
        return file.read(int(match[2], 16))


def _versions(capabilities: list[int]) -> list[str]:
    return [f"{capability // 10}.{capability % 10}" for capability in capabilities]


if __name__ == "__main__":
    main()
