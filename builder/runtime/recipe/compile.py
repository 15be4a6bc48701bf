"""Compile the TensorRT plan of a version, compare it with ONNX Runtime's answers, and put it beside its recipe.

python3 NAME_model/1/recipe/compile.py, on the GPU that is to serve it, in the TensorRT container of its Triton release.

Until then Triton cannot load that version. recipe.json says what to build; inputs.json and
outputs.json hold calls and ONNX Runtime's answers to them, in polygraphy's own formats. Needs tensorrt and polygraphy.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

FOLDER = "recipe"  # folder of this file and the graph, in the version's folder
PLAN = "model.plan"


class CompileError(Exception):
    """Compilation is not possible; the message says what is missing or wrong, and what to do about it."""


def compile_plan(recipe: Path) -> "dict[str, Any] | None":
    """Compile one recipe folder's plan; return its fingerprint, or None if this GPU's plan is already there.

    Raises CompileError; the previous version then stays as it was.
    """
    options = json.loads((recipe / "recipe.json").read_text("utf-8"))
    version = recipe.parent
    model = version.parent
    if sha256(*graph_files(recipe, options["onnx"])) != options["onnx_sha256"]:
        raise CompileError(f"{model.name}: {options['onnx']} is not the graph that was built; build the model again")
    fingerprint = {**this_machine(), "onnx_sha256": options["onnx_sha256"]}
    has, least = fingerprint["compute_capability"], options["least_capability"]
    if [int(part) for part in has.split(".")] < [int(part) for part in least.split(".")]:
        raise CompileError(
            f"{model.name}: {options['precision']} needs a GPU of compute capability {least}; {fingerprint['gpu']} has "
            f"{has}. Build it with --precision fp16"
        )
    if _compiled(version, fingerprint):
        return None
    staging = version / "compiling"
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir()
    try:
        largest = build(recipe, options, staging / PLAN)
        fingerprint.update(sha256=sha256(staging / PLAN), error=largest)
        _publish(version, staging, fingerprint)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return fingerprint


def this_machine() -> "dict[str, str]":
    """Return the versions of TensorRT and the GPU, to which a plan is bound. Raises CompileError if one is missing."""
    try:
        import tensorrt
        from polygraphy import mod  # noqa: F401
    except ImportError as error:
        raise CompileError(
            f"no {error.name or error} here: run this in the TensorRT container of the release (docker compose run "
            "--rm compile), or install tensorrt and polygraphy"
        ) from error
    query = ["nvidia-smi", "--query-gpu=name,compute_cap", "--format=csv,noheader"]
    try:
        lines = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError) as error:
        raise CompileError("no GPU here (nvidia-smi finds none): compile on the machine that is to serve") from error
    name, capability = (part.strip() for part in lines[0].rsplit(",", 1))
    return {"tensorrt": tensorrt.__version__, "gpu": name, "compute_capability": capability}


def build(recipe: Path, options: "dict[str, Any]", plan: Path) -> float:
    """Write the plan and run each of its profiles; return the largest error, relative to each output's largest value.

    Raises CompileError if the plan's answers differ from ONNX Runtime's.
    """
    import tensorrt
    from polygraphy.backend.trt import CreateConfig, Profile, engine_from_network, network_from_onnx_path, save_engine
    from polygraphy.exception import PolygraphyException

    profiles = []
    for inputs in options["profiles"]:
        profile = Profile()
        for name, sides in inputs.items():
            profile.add(name, *(tuple(sides[side]) for side in ("min", "opt", "max")))
        profiles.append(profile)
    timings = recipe / "timing.cache"
    limits = {}
    if options["workspace"] is not None:
        limits[tensorrt.MemoryPoolType.WORKSPACE] = options["workspace"]
    config = CreateConfig(
        profiles=profiles,
        builder_optimization_level=options["optimization_level"],
        memory_pool_limits=limits or None,
        load_timing_cache=str(timings) if timings.is_file() else None,
        tf32=False,  # fp32 stays fp32, as in ONNX Runtime, with whose answers the plan is compared
    )
    typed = hasattr(tensorrt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED")  # later versions have no other mode
    try:
        network = network_from_onnx_path(str(recipe / options["onnx"]), strongly_typed=typed)
        engine = engine_from_network(network, config=config, save_timing_cache=str(timings))
    except PolygraphyException as error:
        raise CompileError(
            f"{name_of(recipe)}: TensorRT {tensorrt.__version__} does not compile this graph ({error}); its log "
            "above says why. Build it with --target cuda, or report it with the checkpoint's name"
        ) from error
    save_engine(engine, str(plan))
    errors = [compare(recipe, options, engine, number) for number in range(len(profiles))]
    compared = [error for error in errors if error is not None]
    if not compared:
        raise CompileError(
            f"{name_of(recipe)}: no profile takes a recorded call, so nothing was compared and nothing published; "
            "give tensorrt.profiles that take single rows"
        )
    return max(compared)


def compare(recipe: Path, options: "dict[str, Any]", engine: Any, profile: int) -> "float | None":
    """Compare one profile on the recorded calls that it takes, by polygraphy's comparator; None if it takes none."""
    import numpy as np
    from polygraphy.backend.trt import TrtRunner
    from polygraphy.comparator import Comparator, RunResults, SimpleCompareFunc
    from polygraphy.json import load_json

    calls = load_json(str(recipe / "inputs.json"))
    results = RunResults.load(str(recipe / "outputs.json"))
    name, expected = results[0]
    limits = options["profiles"][profile]
    fitting = [i for i, call in enumerate(calls) if all(_within(limits[n], a.shape) for n, a in call.items())]
    if not fitting:
        return None
    ran = Comparator.run([TrtRunner(engine, optimization_profile=profile)], data_loader=[calls[i] for i in fitting])
    largest = 0.0
    for output, i in zip(ran[0][1], fitting):
        atol = {n: options["tolerance"] * float(np.abs(expected[i][n]).max()) for n in expected[i]}
        one = RunResults([(name, [expected[i]]), ("TensorRT", [output])])
        if not Comparator.compare_accuracy(one, compare_func=SimpleCompareFunc(rtol=0.0, atol=atol)):
            raise CompileError(
                f"{name_of(recipe)}: in profile {profile} the plan answers otherwise than ONNX Runtime, by more "
                f"than {options['tolerance']:g} of the largest value; nothing was published. Build with "
                "--precision fp32"
            )
        largest = max(
            largest, *(float(np.abs(output[n] - expected[i][n]).max() / np.abs(expected[i][n]).max()) for n in output)
        )
    return largest


def _within(sides: "dict[str, list[int]]", shape: "tuple[int, ...]") -> bool:
    return all(low <= size <= high for low, size, high in zip(sides["min"], shape, sides["max"]))


def name_of(recipe: Path) -> str:
    """Return the name of the model that a recipe belongs to."""
    return recipe.parent.parent.name


def _compiled(version: Path, expected: "dict[str, str]") -> bool:
    """Return True if `version` has the recorded plan, compiled from this graph, for this TensorRT and GPU."""
    recorded = json.loads((version / "build.json").read_text("utf-8")).get("plan") or {}
    if not (version / PLAN).is_file() or any(recorded.get(key) != value for key, value in expected.items()):
        return False
    return recorded.get("sha256") == sha256(version / PLAN)


def _publish(version: Path, staging: Path, fingerprint: "dict[str, Any]") -> None:
    """Move the plan into its version, and record it in every build.json of this build.

    One rename publishes it. If the process is killed, either the old plan or the new one is there. build.json is
    written afterwards: a plan that it does not describe is compiled again. The version's own build.json is written
    last, because that check reads it.
    """
    _sync(staging / PLAN)
    os.replace(staging / PLAN, version / PLAN)
    _sync(version)
    model, number = version.parent, version.name
    reports = [*model.parent.glob("*/build.json"), *model.parent.glob(f"*/{number}/build.json")]
    for report in sorted(reports, key=lambda path: (path.parent == version, path)):
        document = json.loads(report.read_text("utf-8"))
        if model.name in document.get("files", {}) and document.get("version", 1) == int(number):
            document["plan"] = fingerprint
            document["files"][model.name][f"{number}/{PLAN}"] = fingerprint["sha256"]
            written = report.with_name("build.json.new")
            written.write_text(json.dumps(document, indent=1, ensure_ascii=False), "utf-8")
            _sync(written)
            os.replace(written, report)


def _sync(path: Path) -> None:
    """Flush the file or folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def graph_files(folder: Path, onnx: str) -> "list[Path]":
    """Return the graph, and the file of its weights if that is separate."""
    return sorted(folder.glob(f"{Path(onnx).stem}.onnx*"))


def sha256(*paths: Path) -> str:
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as stream:
            for block in iter(lambda: stream.read(1 << 22), b""):
                digest.update(block)
    return digest.hexdigest()


def main() -> int:
    recipe = Path(__file__).resolve().parent
    try:
        fingerprint = compile_plan(recipe)
    except CompileError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    result = f"compiled for {fingerprint['gpu']}, TensorRT {fingerprint['tensorrt']}" if fingerprint else "up to date"
    print(f"{name_of(recipe)}: {result}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
