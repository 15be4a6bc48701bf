"""Plans and checkpoints

Files that belong to one machine: plans of TensorRT, and the arguments of vLLM and TensorRT-LLM.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator

import yaml

from builder.common.releases import RELEASES, version_tuple
from builder.engines import tensorrt
from builder.engines.gpu import gpus
from builder.engines.tensorrt_llm import engine as tensorrt_llm
from builder.engines.vllm import engine as vllm
from builder.repository.lint.findings import Problem
from builder.repository.lint.repository import ModelVersion, RepositoryModel, read_file
from builder.repository.lint.rule import WARNING, rule
from builder.repository.report.record import read_object
from builder.runtime.recipe import compile as program


@rule(
    "TR651",
    wrong="a plan of TensorRT 10.5 for Triton 25.03, which has 10.9",
    right="build-repo compile, in the container of Triton 25.03",
    source="NVIDIA, TensorRT's developer guide: engines are specific to a version of TensorRT and a kind of GPU",
)
def belongs_to_its_tensorrt(version: ModelVersion) -> Iterator[Problem]:
    """Check that a plan runs on the TensorRT and kind of GPU that it was compiled for, and fits the graph beside it.

    TensorRT refuses a plan of another version; one of another GPU is refused, or slow.
    """
    recorded, file = version.model.recorded, version.file(version.graph)
    if version.model.config.backend != tensorrt.BACKEND or not version.graph.is_file() or not recorded:
        return
    again = f"compile it again: build-repo compile {version.model.repository.path}"
    fingerprint = recorded.get("plan")
    if not isinstance(fingerprint, dict):
        yield Problem("build.json does not say what its plan was compiled for", again, file="build.json")
        return
    release = version.model.release
    has = RELEASES[release].tensorrt if release is not None else None
    if has is not None and version_tuple(str(fingerprint.get("tensorrt")))[:2] != version_tuple(has):
        problem = f"its plan was compiled by TensorRT {fingerprint.get('tensorrt')} and Triton {release} has {has}"
        yield Problem(problem, f"in the TensorRT container of that release {again}", file=file)
    here = gpus()
    if here and fingerprint.get("gpu") not in [gpu.name for gpu in here]:
        problem = f"its plan was compiled for {fingerprint.get('gpu')} and this machine has {here[0].name}"
        yield Problem(problem, again, file=file)
    if read_object(version.recipe / "recipe.json").get("onnx_sha256") != fingerprint.get("onnx_sha256"):
        yield Problem("its plan was compiled from another graph than the one beside it", again, file=file)


@rule(
    "TR652",
    wrong="""{"model": "/models/writer/1/checkpoint"}   # and there is no folder checkpoint""",
    right="""{"model": "/models/writer/1/checkpoint"}   # and it holds config.json""",
    source="vllm_backend, src/model.py; TensorRT-LLM, triton_backend/all_models/llmapi",
)
def says_what_it_runs(version: ModelVersion) -> Iterator[Problem]:
    """Check that the file of a model for vLLM or TensorRT-LLM names a checkpoint, and one in the repository is there.

    The engine loads the checkpoint itself: a wrong name is found when Triton starts, after the container was pulled.
    """
    config = version.model.config
    files = {vllm.BACKEND: vllm.MODEL_FILE, "python": tensorrt_llm.MODEL_FILE}
    path = version.path / files.get(config.backend, "")
    if config.backend not in files or (config.backend == "python" and not path.is_file()):
        return
    file = version.file(path)
    try:
        model = str(yaml.safe_load(read_file(path))["model"])  # model.json is YAML too
    except (OSError, TypeError, ValueError, KeyError, RecursionError, yaml.YAMLError) as error:
        yield Problem(f"{file} does not say which model is to run ({error!r})", "build it again", file=file)
        return
    beside = f"/{version.model.name}/{version.number}/"
    if beside in model and not (version.path / model.split(beside, 1)[1] / "config.json").is_file():
        yield Problem(f"{file} names {model}, which is not there", "build it again", file=file)


@rule(
    "TR654",
    wrong="""{"model": "/models/writer/1/checkpoint", "max_num_seq": 64}""",
    right="""{"model": "/models/writer/1/checkpoint", "max_num_seqs": 64}""",
    source="builder/engines/vllm/arguments.toml, the fields of AsyncEngineArgs in each vLLM",
)
def gives_vllm_arguments_that_it_has(version: ModelVersion) -> Iterator[Problem]:
    """Check that the arguments in model.json are those that the vLLM of the release has.

    vLLM refuses an argument that it does not know when it starts, after the checkpoint was read.
    """
    path, release = version.path / vllm.MODEL_FILE, version.model.release
    carried = RELEASES[release].vllm if release is not None else None
    if version.model.config.backend != vllm.BACKEND or carried is None:
        return
    try:
        arguments = yaml.safe_load(read_file(path))
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return  # TR652 reports it
    known = vllm.fields_of(carried)
    for name in arguments if isinstance(arguments, dict) else ():
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1)
            advice = f"write {near[0]}" if near else "leave it out"
            yield Problem(f"vLLM {carried} has no argument {name}", advice, file=version.file(path))


@rule(
    "TR655",
    WARNING,
    wrong='backend: "vllm"',
    right="""backend: "vllm"
model_transaction_policy { decoupled: true }""",
    source="vllm_backend, src/model.py, auto_complete_config and _init_engine_args",
)
def vllm_streams(model: RepositoryModel) -> Iterator[Problem]:
    """Check that a model for vLLM is decoupled.

    Its backend refuses another if it may not complete the configuration itself, as `build-repo` starts Triton.
    """
    config = model.config
    if config.backend == vllm.BACKEND and model.text and not config.model_transaction_policy.decoupled:
        advice = "write model_transaction_policy { decoupled: true }"
        yield Problem("a model for vLLM that is not decoupled", advice, "model_transaction_policy")


@rule(
    "TR653",
    wrong="""classifier_model/
  1/recipe/recipe.json      # and there is no 1/model.plan""",
    right="build-repo compile, on the GPU that is to serve",
)
def has_its_plan(version: ModelVersion) -> Iterator[Problem]:
    """Check that a plan of TensorRT is compiled before the model is served.

    A build writes what to compile; the plan itself belongs to one GPU, and a machine that has one compiles it.
    """
    recipe = version.recipe / "recipe.json"
    if recipe.is_file() and not (version.path / program.PLAN).is_file():
        advice = f"on the GPU that is to serve it: build-repo compile {version.model.repository.path}"
        yield Problem("its plan is not compiled yet", advice, file=version.file(recipe))
