"""Folders and files

Files and folders that Triton looks for before it asks a backend.
"""

from __future__ import annotations

from collections.abc import Iterator

from builder.common.engines import DETECTED
from builder.common.errors import RepositoryError
from builder.repository.config.render import CONFIG, parse
from builder.repository.lint.findings import Edit, Problem
from builder.repository.lint.repository import PLATFORMS, Repository, RepositoryModel
from builder.repository.lint.rule import WARNING, rule

CORE = "core, src/model_config_utils.cc"
OWN_PLATFORM = {  # their backends have platforms of their own in Triton; GetBackendType
    backend: {platform for platform, other in PLATFORMS.items() if other == backend}
    for backend in {*PLATFORMS.values()} - {"pytorch"}
}
COMPLETING = {facts.name for facts in DETECTED}  # their backends complete a configuration by the model's file


@rule(
    "TR101",
    wrong="build-repo check model_repositry",
    right="build-repo check model_repository",
)
def holds_models(repository: Repository) -> Iterator[Problem]:
    """Check that a repository is a folder with a folder for each model.

    Otherwise there is nothing to check, and nothing that Triton could serve.
    """
    output = f"build-repo MODEL --output {repository.path}"
    if not repository.path.is_dir():
        yield Problem(f"{repository.path} is not a folder", f"build a model first: {output}")
    elif not repository.folders:
        yield Problem(f"{repository.path} holds no model", f"build one: {output}")


@rule(
    "TR102",
    wrong="""model_repository/
  .ipynb_checkpoints/
  classifier/config.pbtxt""",
    right="""model_repository/
  classifier/config.pbtxt""",
    source="core, src/model_repository_manager/model_repository_manager.cc, Poll",
)
def is_a_model(repository: Repository) -> Iterator[Problem]:
    """Check that every folder of a repository is a model: it has a config.pbtxt, or a file that implies its backend.

    Triton takes each folder for a model, hidden ones too, and a server that loads all models does not start when one of
    them fails.
    """
    known = {model.path for model in repository.models}
    for folder in repository.folders:
        if folder.file == CONFIG and folder.path not in known and not (folder.path / CONFIG).exists():
            advice = "write one, or move the folder out of the repository"
            yield Problem("has no config.pbtxt", advice, model=folder.name)


@rule(
    "TR103",
    WARNING,
    wrong="""classifier/
  1/model.onnx""",
    right="""classifier/
  config.pbtxt
  1/model.onnx""",
    source=f"{CORE}, AutoCompleteBackendFields",
)
def is_complete(model: RepositoryModel) -> Iterator[Problem]:
    """Check that a configuration states its backend and tensors itself.

    Triton completes the rest when it loads the model, unless it was started with --disable-auto-complete-config, as
    `build-repo serve` starts it. A server that completes configurations also decides for you: ONNX models that can
    batch get max_batch_size 4 and a dynamic batcher.
    """
    written = "write down what Triton made of it: GET v2/models/NAME/config"
    if not model.text:
        yield Problem(f"has no config.pbtxt; Triton would take it for a model of {model.config.backend}", written)
    elif not model.config.input and not model.config.output and model.config.backend in COMPLETING:
        yield Problem("config.pbtxt declares no inputs and no outputs", written)


@rule(
    "TR104",
    wrong="max_batchsize: 8",
    right="max_batch_size: 8",
    source="common, protobuf/model_config.proto",
)
def parses(repository: Repository) -> Iterator[Problem]:
    """Check that a configuration is a ModelConfig in protobuf's text format.

    Triton parses it with the same definition and refuses a field that it does not know, a value of another type, and
    two schedulers in one model.
    """
    for folder in repository.folders:
        try:
            parse(folder.text, folder.name)
        except RepositoryError as error:
            yield Problem(str(error), model=folder.name, file=folder.file)


@rule(
    "TR105",
    wrong="""# classifier/config.pbtxt
name: "classifier_v2\"""",
    right="""# classifier/config.pbtxt
name: "classifier\"""",
    source="core, src/model_repository_manager/model_repository_manager.cc, InitializeModelInfo",
)
def has_the_name_of_its_folder(model: RepositoryModel) -> Iterator[Problem]:
    """Check that the name in a configuration is the name of the model's folder.

    Triton compares the two and refuses the model. Leave the name out, or write the folder's.
    """
    if model.config.name != model.name:
        advice = f"Triton wants the folder's name, {model.name!r}"
        yield Problem(f"{model.file} names it {model.config.name!r}", advice, "name", fix=Edit("name", model.name))


@rule(
    "TR106",
    wrong='platform: "onnx"',
    right='backend: "onnxruntime"',
    source=f"{CORE}, AutoCompleteBackendFields and ValidateModelConfig",
)
def has_a_backend(model: RepositoryModel) -> Iterator[Problem]:
    """Check that a model has a backend: by its field, a platform that Triton knows, or a file with a known name.

    Without any of these Triton does not know which backend runs the model, and refuses it.
    """
    if not model.config.backend and not model.is_ensemble:
        known = ", ".join(PLATFORMS)
        problem = f"platform {model.config.platform!r} is not one of {known}, and there is no backend"
        problem = problem if model.config.platform else f"{model.file} names no backend"
        advice = 'write its backend, such as backend: "onnxruntime" or backend: "python"'
        yield Problem(problem, advice, "platform")


@rule(
    "TR107",
    wrong="""backend: "onnxruntime"
platform: "tensorrt_plan\"""",
    right='backend: "onnxruntime"',
    source=f"{CORE}, ValidateModelConfig, GetBackendType, GetBackendTypeFromPlatform",
)
def has_its_backends_platform(model: RepositoryModel) -> Iterator[Problem]:
    """Check that a platform belongs to the backend beside it.

    Old configurations have both. Triton refuses a pair that does not fit, and an ensemble with a backend.
    """
    config = model.config
    if config.platform and config.platform not in OWN_PLATFORM.get(config.backend, (config.platform,)):
        fits = ", ".join(sorted(OWN_PLATFORM[config.backend]))
        problem = f"platform {config.platform!r} does not belong to the backend {config.backend!r}"
        yield Problem(problem, f"leave platform out, or write {fits}", "platform")


@rule(
    "TR108",
    wrong='output { name: "scores" data_type: TYPE_FP32 dims: [ 2 ] label_filename: "lables.txt" }',
    right='output { name: "scores" data_type: TYPE_FP32 dims: [ 2 ] label_filename: "labels.txt" }',
    source="core, src/model.cc, Model::Init",
)
def has_its_files_of_labels(model: RepositoryModel) -> Iterator[Problem]:
    """Check that a file of labels is in the model's folder.

    Triton reads it when it loads the model, and refuses a path that leads out of the folder.
    """
    for field, output in model.entries("output"):
        path = model.path / output.label_filename
        is_inside = path.is_file() and path.resolve().is_relative_to(model.path.resolve())
        if output.label_filename and not is_inside:
            problem = f"the labels of {output.name}, {output.label_filename}, are not in its folder"
            yield Problem(problem, "put the file beside config.pbtxt", f"{field}.label_filename")


@rule(
    "TR109",
    WARNING,
    wrong="""classifier/
  1 -> /home/me/export""",
    right="""classifier/
  1/model.onnx""",
)
def has_no_links_out_of_the_repository(model: RepositoryModel) -> Iterator[Problem]:
    """Check that a link leads to a place inside the repository.

    A container that mounts the repository, or a copy of it, finds nothing at the other end of a link that leads out.
    """
    root = model.repository.path.resolve()
    for path in (model.path, *sorted(model.path.rglob("*"))):
        if path.is_symlink() and not path.resolve().is_relative_to(root):
            inside = path.relative_to(model.path).as_posix()
            name, file = ("its folder", model.file) if path == model.path else (inside, inside)
            yield Problem(f"{name} is a link to {path.resolve()}", "copy what it leads to", file=file)


@rule(
    "TR110",
    wrong="mkfifo classifier/1/model.onnx",
    right="cp model.onnx classifier/1/",
)
def has_files_and_folders_alone(model: RepositoryModel) -> Iterator[Problem]:
    """Check that a repository contains only files and folders.

    A process that reads a FIFO, a socket or a device waits for ever: Triton, and any program that copies the
    repository.
    """
    for path in sorted(model.path.rglob("*")):
        if path.exists() and not (path.is_file() or path.is_dir()):
            name = path.relative_to(model.path).as_posix()
            yield Problem(f"{name} is neither a file nor a folder", "put the file in its place", file=name)
