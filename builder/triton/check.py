"""Lint a repository without a server: would a stock Triton of the release load it, and is it what was built?

Knows files; starts nothing.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from google.protobuf.json_format import MessageToDict

from builder.engines import onnxruntime, openvino, tensorrt, tensorrt_llm, vllm
from builder.engines.cpu import cpu
from builder.engines.cuda import without_kernel
from builder.engines.gpu import gpus
from builder.errors import BuilderError, RepositoryError
from builder.onnx.graph import Graph, check_release, read_graph
from builder.report.record import read_report
from builder.runtime.contract import FILE, ContractError, GenerationServing, Session, load
from builder.runtime.generation.chat import ChatTemplate
from builder.runtime.generation.executors.openvino import compile_paged
from builder.runtime.recipe import compile as program
from builder.triton import stock
from builder.triton.releases import RELEASES, SHAPES_CHECKED, version_tuple
from builder.triton.render import parse


def check(repository: Path, triton: str | None = None) -> list[str]:
    """The problems found, one sentence each, with the model's name; an empty list where there are none.

    `triton`: the release to check against, instead of the one that each model was built for.
    """
    if not repository.is_dir():
        return [f"{repository} is not a folder; build a model first: build-repo MODEL --output {repository}"]
    folders = [folder for folder in sorted(repository.iterdir()) if folder.is_dir()]
    if not folders:
        return [f"{repository} holds no model; build one: build-repo MODEL --output {repository}"]
    return [f"{folder.name}: {problem}" for folder in folders for problem in _check_entry(folder, triton)]


def pending(repository: Path) -> dict[str, str]:
    """What was built and cannot be loaded yet, by its name: plans that a machine with a GPU has still to compile."""
    models = [recipe.parent.parent for recipe in sorted(repository.glob(f"*/{program.FOLDER}/recipe.json"))]
    return {
        model.name: f"{model.name}: its plan is not compiled yet; on the GPU that is to serve it: "
        f"build-repo compile {repository}"
        for model in models
        if not (model / program.PLAN).is_file()
    }


def _check_entry(folder: Path, triton: str | None) -> Iterator[str]:
    path = folder / "config.pbtxt"
    if not path.is_file():
        yield "has no config.pbtxt"
        return
    try:
        config = parse(path.read_text("utf-8"), folder.name)
    except BuilderError as error:
        yield str(error)
        return
    if config.name != folder.name:
        yield f"config.pbtxt names it {config.name!r}; Triton wants the folder's name"
    versions = [version for version in folder.iterdir() if version.is_dir() and version.name.isdigit()]
    if not versions and not (folder / program.FOLDER).is_dir():
        yield "has no version folder such as 1/"
    absent = set(map(str, config.version_policy.specific.versions)) - {version.name for version in versions}
    if absent and versions:
        yield f"version_policy asks for version {min(absent)}, which is not there"
    report = folder / "build.json"
    try:
        recorded = json.loads(report.read_text("utf-8")) if report.is_file() else {}
    except ValueError as error:
        yield f"build.json is not JSON: {error}; build it again"
        recorded = {}
    release = triton or recorded.get("triton")
    for version in versions:
        if config.backend == onnxruntime.BACKEND:
            yield from _check_graph(version, config, release)
        elif config.backend == openvino.BACKEND:
            yield from _check_representation(version, config, release)
        elif config.backend == tensorrt.BACKEND:
            yield from _check_plan(version, recorded.get("plan"), release)
        elif config.backend == vllm.BACKEND:
            yield from _check_arguments(version / vllm.MODEL_FILE)
        elif config.backend == "python":
            yield from _check_python(version, folder.parent, release)
            if (version / tensorrt_llm.MODEL_FILE).is_file():
                yield from _check_arguments(version / tensorrt_llm.MODEL_FILE)
    for name, digest in recorded.get("files", {}).get(folder.name, {}).items():
        if not (folder / name).is_file():
            yield f"{name} is missing"
        elif hashlib.sha256((folder / name).read_bytes()).hexdigest() != digest:
            yield f"{name} is not the file that was built; build it again"


def _check_graph(version: Path, config: object, release: str | None) -> Iterator[str]:
    model = version / onnxruntime.MODEL_FILE
    if not model.is_file():
        yield f"{version.name}/{onnxruntime.MODEL_FILE} is missing"
        return
    yield from _refused_by_backend(config, onnxruntime.signature(model), release)
    graph = read_graph(model)
    if release in RELEASES:
        yield from _refused(graph, release, in_process=False)


def _refused(graph: Graph, release: str, in_process: bool) -> Iterator[str]:
    """Why the ONNX Runtime that is to run a graph there would not, or would say something else."""
    try:
        check_release(graph, release, in_process)
        if graph.arithmetic == "bf16":
            without_kernel(graph.operators, "bf16", release)
    except BuilderError as error:
        yield str(error)


def _refused_by_backend(config: Any, graph: stock.Signature, release: str | None) -> Iterator[str]:
    """What Triton's own backend of the release would not load; and what it would, with no effect."""
    document = MessageToDict(config, preserving_proto_field_name=True)
    yield from stock.refusals(document, release)
    yield from stock.mismatches(document, graph)
    wrong = stock.wrong_batch(document, 1)
    if wrong is not None:
        yield wrong
    for name in stock.without_effect(document, release):
        yield f"the parameter {name} has no effect: Triton's {config.backend} backend does not read it; leave it out"


def _check_representation(version: Path, config: object, release: str | None) -> Iterator[str]:
    """OpenVINO's two files, and the tensors that config.pbtxt says they have."""
    model = version / openvino.MODEL_FILE
    missing = [file.name for file in (model, model.with_suffix(".bin")) if not file.is_file()]
    if missing:
        yield f"{version.name}/{missing[0]} is missing"
        return
    try:
        graph = openvino.signature(model)
    except RuntimeError as error:
        yield f"{version.name}/{model.name} cannot be read: {str(error).strip().splitlines()[-1]}; build it again"
        return
    yield from _refused_by_backend(config, graph, release)


def _check_plan(version: Path, fingerprint: dict[str, str] | None, release: str | None) -> Iterator[str]:
    """A plan belongs to one TensorRT and one kind of GPU, and to the graph that it was compiled from."""
    again = f"compile it again: build-repo compile {version.parent.parent}"
    if not (version / tensorrt.MODEL_FILE).is_file():
        yield f"{version.name}/{tensorrt.MODEL_FILE} is missing; {again}"
        return
    if fingerprint is None:
        yield f"build.json does not say what its plan was compiled for; {again}"
        return
    has = RELEASES[release].tensorrt if release in RELEASES else None
    if has is not None and version_tuple(fingerprint["tensorrt"])[:2] != version_tuple(has):
        yield (
            f"its plan was compiled by TensorRT {fingerprint['tensorrt']} and Triton {release} has {has}; in the "
            f"TensorRT container of that release {again}"
        )
    here = gpus()
    if here and fingerprint["gpu"] not in [gpu.name for gpu in here]:
        yield f"its plan was compiled for {fingerprint['gpu']} and this machine has {here[0].name}; {again}"
    recipe = version.parent / program.FOLDER
    asked = json.loads((recipe / "recipe.json").read_text("utf-8")) if (recipe / "recipe.json").is_file() else {}
    if asked.get("onnx_sha256") != fingerprint["onnx_sha256"]:
        yield f"its plan was compiled from another graph than the one beside it; {again}"


def _check_arguments(path: Path) -> Iterator[str]:
    """What vLLM or TensorRT-LLM is started with, and the checkpoint where that lies in the repository."""
    version = path.parent
    try:
        arguments = yaml.safe_load(path.read_text("utf-8"))  # model.json is YAML too
        model = str(arguments["model"])
    except (OSError, TypeError, ValueError, KeyError, yaml.YAMLError) as error:
        yield f"{version.name}/{path.name} does not say which model is to run ({error!r}); build it again"
        return
    beside = f"/{version.parent.name}/{version.name}/"
    if beside in model and not (version / model.split(beside, 1)[1] / "config.json").is_file():
        yield f"{version.name}/{path.name} names {model}, which is not there; build it again"


def warnings(repository: Path, triton: str | None = None) -> list[str]:
    """What would work and yet not be what was built for, or not for long: processors, and releases that crash."""
    here = cpu()["flags"]
    found = []
    for path in sorted(repository.glob("*/build.json")):
        try:
            recorded = json.loads(path.read_text("utf-8"))
        except ValueError:
            continue  # a problem, which `check` names
        name = path.parent.name
        if recorded.get("name") != name:
            continue  # an engine, beside its front
        wanted = recorded.get("tuned_for", ())
        if wanted and not set(wanted) & set(here):
            found.append(
                f"{name}: chosen on {recorded['cpu']['model']} for its {' or '.join(wanted)}, which this "
                "processor lacks: it may be slow here; build it again here to measure"
            )
        release = triton or recorded.get("triton")
        if release in RELEASES and version_tuple(release) < version_tuple(SHAPES_CHECKED):
            found.append(
                f"{name}: one HTTP request with too large a shape ends Triton {release}; serve it on "
                f"{SHAPES_CHECKED} or later, or put the gateway in front, which refuses such requests"
            )
    return found


def verdicts(repository: Path) -> dict[str, str]:
    """Whether each model was verified, and on what; of the reports that can be read. `check` names the others."""
    found = {}
    for path in sorted(repository.glob("*/build.json")):
        with contextlib.suppress(RepositoryError):
            report = read_report(repository, path.parent.name)
            if report.name == path.parent.name:  # an engine beside its front has the same report
                found[report.name] = report.verdict
    return found


def _check_python(version: Path, repository: Path, release: str | None) -> Iterator[str]:
    python = RELEASES[release].python if release in RELEASES else "3.10"
    feature = tuple(int(part) for part in python.split("."))
    for source in sorted(version.rglob("*.py")):
        try:
            ast.parse(source.read_text("utf-8"), feature_version=(feature[0], feature[1]))
        except SyntaxError as error:
            yield f"{source.relative_to(version.parent)} is not valid Python {python}: {error}"
    serving = version / FILE
    if serving.is_file():
        try:
            served = load(version)
        except ContractError as error:
            yield str(error)
            return
        if isinstance(served, GenerationServing) and served.chat is not None:
            problem = ChatTemplate(served.chat.template, served.chat.special_tokens).problem
            if problem:
                yield f"{version.name}/{FILE}: {problem}; chats are refused, texts are answered"
        if served.engine is not None and not (repository / served.engine / "config.pbtxt").is_file():
            yield f"its engine {served.engine} is not in the repository"
        if served.model is not None:
            paged = isinstance(served, GenerationServing) and served.session.engine == openvino.BACKEND
            yield from _check_own_graph(version / served.model, release, paged)


def _check_own_graph(model: Path, release: str | None, paged: bool) -> Iterator[str]:
    """The graph that a front runs in its own process; `paged`: one of ONNX operators and our own, for OpenVINO."""
    files = [model, model.with_suffix(".bin")] if model.suffix == Path(openvino.MODEL_FILE).suffix else [model]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        yield f"{model.parent.name}/{missing[0]} is missing"
    elif paged:
        yield from _refused_by_openvino(model)
    elif len(files) == 1 and release in RELEASES:
        yield from _refused(read_graph(model), release, in_process=True)


def _refused_by_openvino(model: Path) -> Iterator[str]:
    """Why the OpenVINO that the emitted requirements pin would not open the graph of a decode loop."""
    try:
        compile_paged(model, Session(engine="openvino", entries=openvino.decoder_properties("float32")))
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[-1]
        yield f"{model.parent.name}/{model.name} cannot be opened by OpenVINO: {reason}; build it again"
