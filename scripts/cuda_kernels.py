"""Operators with CUDA kernels in an ONNX Runtime, with their types: builder/engines/cuda/cuda_kernels.json.

python -m scripts.cuda_kernels VERSION ...

ONNX Runtime itself lists the kernels, from the onnxruntime-gpu of that version. It only lists them after it has opened
CUDA's libraries and found a device, so it is given libraries that do nothing and a fake device: no GPU and no CUDA are
needed. Needs gcc, nm and readelf.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

TABLE = Path(__file__).parent.parent / "builder" / "engines" / "cuda" / "cuda_kernels.json"
REAL = {"tensor(float)": "fp32", "tensor(float16)": "fp16", "tensor(bfloat16)": "bf16"}
OURS = re.compile(r"nvinfer|nvonnxparser|libcuda\.|cublas|cudnn|cufft|curand|cudart|nvrtc|cusparse|cusolver")
DEVICE = """
#include <stddef.h>
#include <string.h>
int cudaGetDeviceCount(int *n) { *n = 1; return 0; }
int cudaGetDevice(int *d) { *d = 0; return 0; }
int cudaMemGetInfo(size_t *f, size_t *t) { *f = *t = (size_t)16 << 30; return 0; }
int cudaGetDeviceProperties(void *p, int d) { memset(p, 0, 700); return 0; }
int cudaGetDeviceProperties_v2(void *p, int d) { memset(p, 0, 1032); return 0; }
int cudaDeviceGetAttribute(int *v, int a, int d) { *v = 8; return 0; }
int getInferLibVersion(void) { return 100000; }
void *__cudaRegisterFatBinary(void *x) { static void *handle[64]; return handle; }
char *cudaGetErrorString(int error) { return ""; }
"""
LIST = """
import json
from onnxruntime.capi import onnxruntime_pybind11_state as state
found = {}
for kernel in state.get_all_opkernel_def():
    if kernel.provider == "CUDAExecutionProvider":
        types = kernel.type_constraints.get("T") or kernel.type_constraints.get("T1") or []
        found.setdefault(kernel.op_name, set()).update(types)
print(json.dumps({name: sorted(types) for name, types in found.items()}))
"""


def main() -> None:
    table = json.loads(TABLE.read_text()) if TABLE.exists() else {}
    for version in sys.argv[1:]:
        kernels = list_kernels(version)
        table[version] = {
            name: sorted(REAL[t] for t in types if t in REAL)
            for name, types in sorted(kernels.items())
            if any(t in REAL for t in types)
        }
        print(f"ONNX Runtime {version}: {len(table[version])} operators of real numbers have CUDA kernels")
        ordered = sorted(table, key=lambda version: [int(part) for part in version.split(".")])
        rows = [f' "{v}": {json.dumps(table[v], separators=(",", ":"))}' for v in ordered]
        TABLE.write_text("{\n" + ",\n".join(rows) + "\n}\n")


def list_kernels(version: str) -> dict[str, list[str]]:
    """Return every operator with a CUDA kernel, and the types of its first type constraint."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", scratch]
        subprocess.run([*pip, f"onnxruntime-gpu=={version}"], check=True, stderr=subprocess.DEVNULL)
        with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
            wheel.extractall(folder)
        libraries = sorted((folder / "onnxruntime" / "capi").glob("libonnxruntime_providers_*.so"))
        _make_stubs(libraries, folder)
        environment = {
            **os.environ,
            "LD_LIBRARY_PATH": scratch,
            "LD_PRELOAD": str(folder / "device.so"),
            "PYTHONPATH": scratch,
        }
        program = [sys.executable, "-c", LIST]
        ran = subprocess.run(program, env=environment, capture_output=True, text=True, cwd=scratch)
        if ran.returncode:
            raise SystemExit(f"ONNX Runtime {version} lists no kernels ({ran.returncode}): {ran.stderr.strip()[-600:]}")
        kernels: dict[str, list[str]] = json.loads(ran.stdout)
        return kernels


def _make_stubs(libraries: list[Path], folder: Path) -> None:
    """Build, for each NVIDIA library that these need, a library that has all the functions and does nothing."""
    wanted, functions = set(), set()
    for library in libraries:
        needed = subprocess.run(["readelf", "-d", library], capture_output=True, text=True, check=True).stdout
        wanted |= {name for name in re.findall(r"NEEDED.*\[(.+?)\]", needed) if OURS.search(name)}
        undefined = subprocess.run(["nm", "-D", "-u", library], capture_output=True, text=True, check=True).stdout
        names = re.findall(r"U (\w+)", undefined)
        functions |= {n for n in names if re.match(r"(__)?(cu|create(Infer|Nv)|get(Plugin|Infer)|nvrtc)", n)}
    known = set(re.findall(r"^\w+ \*?(\w+)\(", DEVICE, re.MULTILINE))
    (folder / "device.c").write_text(DEVICE)
    (folder / "stubs.c").write_text("".join(f"void *{name}() {{ return 0; }}\n" for name in sorted(functions - known)))
    _compile(folder / "device.c", folder / "device.so")
    for name in wanted:  # the version of a symbol is its library's name
        (folder / "versions").write_text(f"{name} {{ global: *; }};\n")
        _compile(folder / "stubs.c", folder / name, f"-Wl,-soname,{name}", f"-Wl,--version-script,{folder}/versions")


def _compile(source: Path, library: Path, *options: str) -> None:
    subprocess.run(["gcc", "-w", "-shared", "-fPIC", *options, "-o", str(library), str(source)], check=True)


if __name__ == "__main__":
    main()
