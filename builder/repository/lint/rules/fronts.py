"""Python models

The Python that Triton runs: what `build-repo` emitted, and models that others wrote.
"""

from __future__ import annotations

from collections.abc import Iterator

from builder.common.errors import RepositoryError
from builder.common.releases import RELEASES
from builder.engines import graph_engine
from builder.repository.lint.calls import CLASS, PythonSource, read_source, syntax_error
from builder.repository.lint.findings import Problem
from builder.repository.lint.repository import ModelVersion, RepositoryModel
from builder.repository.lint.rule import rule
from builder.repository.sharing.hosting import MODELS, config_of, read_hosted, refuse_misfit, refuse_other
from builder.runtime.contract import FILE, ContractError, GenerationServing, read
from builder.runtime.generation.chat import ChatTemplate
from builder.runtime.hosted import HOSTED

OLDEST_PYTHON = "3.10"  # of the containers
PYTHON = "python"
DECOUPLED = "model_transaction_policy.decoupled"
ENVIRONMENT = "EXECUTION_ENV_PATH"
OWN_FOLDER = "$$TRITON_MODEL_DIRECTORY"


@rule(
    "TR701",
    wrong="""type Row = list[int]   # Python 3.12, for Triton 24.10, which has 3.10""",
    right="""Row = list[int]""",
    source="the compatibility page of Triton, in builder/common/releases.toml",
)
def is_python_of_its_release(version: ModelVersion) -> Iterator[Problem]:
    """Check that the Python of a model compiles with the Python of the release's container.

    That is 3.10 up to Triton 24.10 and 3.12 from 24.11 on; if no release is named, 3.10 is assumed.
    """
    release = version.model.release
    python = RELEASES[release].python if release is not None else OLDEST_PYTHON
    major, minor = map(int, python.split("."))
    for source in version.python_files:
        error = syntax_error(source.read_bytes(), (major, minor))
        if error is not None:
            yield Problem(f"{version.file(source)} is not valid Python {python}: {error}", file=version.file(source))


@rule(
    "TR702",
    wrong="serving.json of one version of build-repo beside the code of another",
    right="both of the same build",
)
def has_a_serving_document_that_its_code_reads(version: ModelVersion) -> Iterator[Problem]:
    """Check that serving.json is what the emitted code beside it reads.

    The two are written together. A file that was edited, or copied from another build, stops the model when it loads.
    """
    for folder in (version.path, version.draft):
        try:
            if (folder / FILE).is_file():
                read(folder)
        except ContractError as error:
            yield Problem(str(error), file=version.file(folder / FILE))


@rule(
    "TR703",
    wrong="{% for message in messages %}{{ message.content }}",
    right="{% for message in messages %}{{ message.content }}{% endfor %}",
)
def has_a_chat_template_that_compiles(version: ModelVersion) -> Iterator[Problem]:
    """Check that the chat template of a model compiles.

    If it does not, the model answers texts and refuses chats.
    """
    served = version.serving
    if isinstance(served, GenerationServing) and served.chat is not None:
        chat = served.chat
        problem = ChatTemplate(chat.template, chat.special_tokens, chat.tool_template).problem
        if problem:
            file = f"{version.number}/{FILE}"
            yield Problem(f"{file}: {problem}", "chats are refused, texts are answered", file=file)


@rule(
    "TR704",
    wrong="a front whose model.onnx was left out of a copy",
    right="the whole folder, as it was built",
)
def has_the_graph_that_it_runs(version: ModelVersion) -> Iterator[Problem]:
    """Check that the graph that a front runs in its own process is beside it and opens in its engine.

    The same applies to the graph of its draft. The front opens it when it loads, and does not load without it.
    """
    for folder, served in version.documents:
        if served.model is None:
            continue
        model, generates = folder / served.model, isinstance(served, GenerationServing)
        engine = graph_engine(served.session.engine if isinstance(served, GenerationServing) else served.executor)
        missing = [version.file(file) for file in engine.files(model) if not file.is_file()]
        refused = engine.refused_loop(model) if generates and not missing else None
        if missing:
            yield Problem(f"{missing[0]} is missing", "build it again", file=missing[0])
        elif refused is not None:
            problem = f"{version.file(model)} cannot be opened by {engine.facts.title}: {refused}"
            yield Problem(problem, "build it again", file=version.file(model))


def _entry(version: ModelVersion) -> PythonSource | None:
    """Return the module that Triton imports; None if it is not for Python's own backend, or cannot be read."""
    if version.model.config.backend != PYTHON or not version.graph.is_file():
        return None
    return read_source(version.graph)


@rule(
    "TR705",
    wrong="class Model:\n    def execute(self, requests): ...",
    right="class TritonPythonModel:\n    def execute(self, requests): ...",
    source="python_backend, src/pb_stub.cc, Stub::Initialize",
)
def has_the_class_that_triton_makes(version: ModelVersion) -> Iterator[Problem]:
    """Check that model.py has a class TritonPythonModel.

    Triton creates an object of it for each instance, and refuses the model without it.
    """
    source = _entry(version)
    if source is not None and not {CLASS, "*"} & source.names:
        file = version.file(version.graph)
        yield Problem(f"{file} has no class {CLASS}", "name the model's class so", file=file)


@rule(
    "TR706",
    wrong="class TritonPythonModel:\n    def run(self, requests): ...",
    right="class TritonPythonModel:\n    def execute(self, requests): ...",
    source="python_backend, src/pb_stub.cc, Stub::ProcessRequests",
)
def has_the_method_that_triton_calls(version: ModelVersion) -> Iterator[Problem]:
    """Check that TritonPythonModel has a method execute.

    The model loads without it, and every request fails.
    """
    source = _entry(version)
    if source is not None and source.methods is not None and "execute" not in source.methods:
        file = version.file(version.graph)
        yield Problem(f"{CLASS} of {file} has no method execute", "write def execute(self, requests)", file=file)


@rule(
    "TR707",
    wrong="""model_transaction_policy { decoupled: true }
# and in model.py: return [response]""",
    right="""model_transaction_policy { decoupled: true }
# and in model.py: request.get_response_sender().send(response)""",
    source="python_backend, src/pb_stub.cc, Stub::ProcessRequests",
)
def a_decoupled_model_sends(version: ModelVersion) -> Iterator[Problem]:
    """Check that the Python of a decoupled model sends its answers through the response sender of each request.

    Triton refuses a response that execute returns: every request of such a model fails.
    """
    entry = _entry(version)
    if entry is None or entry.methods is None or not version.model.config.model_transaction_policy.decoupled:
        return
    sources = map(read_source, version.python_files)
    if not any(source is None or source.takes_sender for source in sources):
        problem = "the model is decoupled and its Python takes no response sender"
        yield Problem(problem, "send through request.get_response_sender(), or leave decoupled out", DECOUPLED)


@rule(
    "TR708",
    wrong="""# and there is no env.tar.gz
parameters { key: "EXECUTION_ENV_PATH" value { string_value: "$$TRITON_MODEL_DIRECTORY/env.tar.gz" } }""",
    right="""# and env.tar.gz lies beside config.pbtxt
parameters { key: "EXECUTION_ENV_PATH" value { string_value: "$$TRITON_MODEL_DIRECTORY/env.tar.gz" } }""",
    source="core, src/model_config_utils.cc, LocalizePythonBackendExecutionEnvironmentPath",
)
def has_its_environment(model: RepositoryModel) -> Iterator[Problem]:
    """Check that the environment of a Python model exists if it lies in the model's folder.

    Triton unpacks it when it loads the model. An environment elsewhere is not checked: the path is the server's.
    """
    path = model.parameter(ENVIRONMENT) if model.config.backend == PYTHON else ""
    inside = path.removeprefix(OWN_FOLDER).lstrip("/")
    if path.startswith(OWN_FOLDER) and not (model.path / inside).exists():
        yield Problem(f"its environment {inside} is not in its folder", "add it", f"parameters[{ENVIRONMENT}]")


@rule(
    "TR709",
    wrong="""encoders/models/hosted.json   # says that version 3 of minilm answers
encoders/models/minilm/2/     # and there is no 3""",
    right="build-repo rollback minilm 2 --repository model_repository/encoders/models",
)
def hosts_models_that_are_there(model: RepositoryModel) -> Iterator[Problem]:
    """Check that hosted.json agrees with the files of a shared front's models, and that the front has their tensors.

    The front loads a model on its first request: one that is not there, or does not fit, fails then.
    """
    models, file = model.path / MODELS, f"{MODELS}/{HOSTED}"
    if not (models / HOSTED).is_file():
        return
    try:
        hosted = read_hosted(models)
    except RepositoryError as error:
        yield Problem(str(error), file=file)
        return
    for name in hosted:
        try:
            refuse_other(hosted, name, models)
            refuse_misfit(model.config, config_of(models / name, hosted[name].version))
        except (RepositoryError, ContractError) as error:
            yield Problem(str(error), "build it again into the same folder", file=file)
