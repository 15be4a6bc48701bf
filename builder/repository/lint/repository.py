"""Repository as Triton sees it: models with their configurations as Triton completes them, and their versions.

The repository may come from any tool: what cannot be read is None or empty here, and a rule reports it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import Any

from google.protobuf.json_format import MessageToDict
from tritonclient.grpc.model_config_pb2 import ModelConfig, ModelInstanceGroup

from builder.common.engines import DETECTED, ENGINES, EngineFacts
from builder.common.errors import RepositoryError
from builder.common.hashing import FileDigests
from builder.common.releases import RELEASES
from builder.repository.config.render import CONFIG, parse
from builder.repository.lint.pbtxt import FieldSpan, field_spans
from builder.repository.report.record import REPORT, read_object
from builder.runtime.contract import DRAFT, FILE, ContractError, Serving, load
from builder.runtime.recipe import compile as program

CONFIGS = "configs"  # folder of the configurations among which --model-config-name chooses
BESIDE_VERSIONS = ("warmup", "initial_state", CONFIGS)  # core, model_lifecycle.cc, VersionsToLoad
ENSEMBLE = "ensemble"
# core, model_config_utils.cc, AutoCompleteBackendFields: the backend that a platform, or a file that exists, implies.
PLATFORMS = {
    **{platform: facts.name for facts in DETECTED for platform in facts.platforms},
    "pytorch_libtorch": "pytorch",
    "tensorflow_graphdef": "tensorflow",
    "tensorflow_savedmodel": "tensorflow",
}
FILES = {**{facts.name: facts.model_file for facts in DETECTED}, "pytorch": "model.pt", "python": "model.py"}
# Instances on a CPU without a number in the configuration, if that is not one.
CPU_INSTANCES = {**{name: facts.cpu_instances for name, facts in ENGINES.items()}, "tensorflow": 2}
NUMBER = re.compile(r"\s*[+-]?\d+")  # as much of a folder's name as std::stoll reads


@dataclass(frozen=True)
class Repository:
    """Repository of models.

    `triton`: the release to check against, instead of the one that each model was built for. `verify_key`: the key that
    must have signed every model; None: no signature is required. `digests`: of files that several models have in
    common.
    """

    path: Path
    triton: str | None = None
    verify_key: Path | None = None
    digests: FileDigests = field(default_factory=FileDigests, compare=False)

    @cached_property
    def folders(self) -> tuple[RepositoryModel, ...]:
        """Every folder, once for each of its configurations; hidden ones too: Triton takes them for models."""
        folders = []
        for path in _subfolders(self.path) if self.path.is_dir() else ():
            others = [f"{CONFIGS}/{file.name}" for file in sorted((path / CONFIGS).glob("*.pbtxt"))]
            folders += [RepositoryModel(self, path, file) for file in (CONFIG, *others)]
        return tuple(folders)

    @cached_property
    def models(self) -> tuple[RepositoryModel, ...]:
        """Models whose configuration can be read, or whose backend Triton finds without one."""
        models = []
        for folder in self.folders:
            with suppress(RepositoryError):
                if folder.config.backend or (folder.path / folder.file).is_file():
                    models.append(folder)
        return tuple(models)

    @property
    def versions(self) -> list[ModelVersion]:
        """Versions of all models that their model's configuration applies to."""
        return [version for model in self.models for version in model.versions if version.is_checked]

    @cached_property
    def by_name(self) -> Mapping[str, RepositoryModel]:
        """Models that others can call, by folder, with the configuration that Triton uses by default."""
        return {model.name: model for model in self.models if model.file == CONFIG}


@dataclass(frozen=True)
class RepositoryModel:
    """Folder that Triton takes for a model, with one of its configurations; `file`: relative to the folder."""

    repository: Repository
    path: Path
    file: str

    @cached_property
    def name(self) -> str:
        return self.path.name

    @cached_property
    def text(self) -> str:
        """Text of the configuration; empty if there is none. Raises RepositoryError if it cannot be read.

        Bytes that are not UTF-8 are replaced: in a comment Triton ignores them.
        """
        path = self.path / self.file
        try:
            return path.read_text("utf-8", errors="replace") if path.is_file() else ""
        except OSError as error:
            raise RepositoryError(f"{self.file} of {self.name} is not a Triton model configuration: {error}") from error

    @cached_property
    def config(self) -> Any:
        """Return the ModelConfig as Triton completes it. Raises RepositoryError if it does not parse."""
        return _completed(parse(self.text, self.name), self.path)

    def entries(self, *fields: str) -> Iterator[tuple[str, Any]]:
        """Yield the entries of repeated fields of the configuration, each with its place, such as `input[0]`."""
        for field_name in fields:
            for number, entry in enumerate(attrgetter(field_name)(self.config)):
                yield f"{field_name}[{number}]", entry

    def parameter(self, name: str) -> str:
        """Return a parameter of the configuration; empty if it is missing."""
        return self.config.parameters[name].string_value if name in self.config.parameters else ""

    @cached_property
    def spans(self) -> Mapping[str, FieldSpan]:
        return field_spans(self.text)

    @cached_property
    def document(self) -> dict[str, Any]:
        """Configuration as Triton hands it to backends."""
        document: dict[str, Any] = MessageToDict(self.config, preserving_proto_field_name=True)
        return {"backend": "", **document}

    @cached_property
    def recorded(self) -> dict[str, Any]:
        """Content of build.json; empty if it is missing or cannot be read."""
        return read_object(self.path / REPORT)

    @property
    def release(self) -> str | None:
        """Triton release that is to serve the model; None if none is named, or an unknown one."""
        release = self.repository.triton or self.recorded.get("triton")
        return release if isinstance(release, str) and release in RELEASES else None

    @property
    def engine(self) -> EngineFacts | None:
        """Facts about the engine of the model's backend; None for a backend that is not a known engine's."""
        return ENGINES.get(self.config.backend)

    @property
    def is_on_gpu(self) -> bool:
        """True if an instance is declared to run on a GPU."""
        return any(group.kind == ModelInstanceGroup.KIND_GPU for group in self.config.instance_group)

    @property
    def instances(self) -> int:
        """Number of instances that Triton creates per machine: core, model_config_utils.cc, SetDefaultInstanceCount."""
        groups = self.config.instance_group
        default = CPU_INSTANCES.get(self.config.backend, 1)
        return sum((group.count or default) * max(1, len(group.gpus)) for group in groups) if groups else default

    @property
    def is_ensemble(self) -> bool:
        return bool(self.config.platform == ENSEMBLE or self.config.HasField("ensemble_scheduling"))

    @cached_property
    def versions(self) -> tuple[ModelVersion, ...]:
        """Version folders, the oldest first."""
        paths = {int(path.name): path for path in _subfolders(self.path) if re.fullmatch(r"0|[1-9]\d*", path.name)}
        return tuple(ModelVersion(self, path, number in self.served_numbers) for number, path in sorted(paths.items()))

    @cached_property
    def served_numbers(self) -> frozenset[int]:
        """Versions that Triton loads: core, model_lifecycle.cc, VersionsToLoad."""
        names = [path.name for path in _subfolders(self.path) if path.name not in BESIDE_VERSIONS]
        matches = [NUMBER.match(name) for name in names if len(name) == 1 or not name.startswith("0")]
        numbers = sorted({int(match.group()) for match in matches if match is not None}, reverse=True)
        policy = self.config.version_policy
        if policy.HasField("specific"):
            return frozenset(numbers) & frozenset(policy.specific.versions)
        if policy.HasField("all"):
            return frozenset(numbers)
        return frozenset(numbers[: policy.latest.num_versions if policy.HasField("latest") else 1])


def read_file(path: Path) -> str:
    """Return the text of a file. Raises OSError, also for a FIFO, whose data may never come, and ValueError."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not a file")
    return path.read_text("utf-8")


@dataclass(frozen=True)
class ModelVersion:
    """Version folder. `is_served`: Triton loads it."""

    model: RepositoryModel
    path: Path
    is_served: bool

    @property
    def number(self) -> str:
        return self.path.name

    @property
    def graph(self) -> Path:
        """File that the model's backend opens; it may be absent."""
        config = self.model.config
        path, engine = self.path / (config.default_model_filename or FILES.get(config.backend, "")), self.model.engine
        return path / path.name if engine is not None and engine.opens_folders and path.is_dir() else path

    @property
    def is_checked(self) -> bool:
        """True if the model's configuration applies to this version: one that is not served yet keeps its own."""
        return self.is_served or not (self.path / CONFIG).is_file()

    @property
    def recipe(self) -> Path:
        """Folder of the files that the plan is compiled from; it may be absent."""
        return self.path / program.FOLDER

    def file(self, path: Path) -> str:
        """Return `path` relative to the model's folder, as findings name it."""
        return Path(os.path.relpath(path, self.model.path)).as_posix()

    @cached_property
    def serving(self) -> Serving | None:
        """Content of a front's serving.json; None if it is missing, cannot be read, or is of a shared front."""
        return _serving(self.path)

    @cached_property
    def python_files(self) -> list[Path]:
        """Python files of a model of Python's own backend; none of another backend's."""
        files = self.path.rglob("*.py") if self.model.config.backend == "python" else ()
        return sorted(path for path in files if path.is_file())

    @property
    def draft(self) -> Path:
        """Folder of the draft model; it may be absent."""
        return self.path / DRAFT

    @cached_property
    def documents(self) -> Sequence[tuple[Path, Serving]]:
        """Readable serving documents, of the version and of its draft, with their folders."""
        pairs = ((self.path, self.serving), (self.draft, _serving(self.draft)))
        return [(folder, serving) for folder, serving in pairs if serving is not None]


def _serving(folder: Path) -> Serving | None:
    try:
        return load(folder) if (folder / FILE).is_file() else None
    except ContractError:
        return None


def _subfolders(path: Path) -> list[Path]:
    return [entry for entry in sorted(path.iterdir()) if entry.is_dir()]


def _completed(config: ModelConfig, path: Path) -> ModelConfig:
    """Return the configuration with what Triton fills in without opening the model's file: name, backend, file."""
    if not config.name:
        config.name = path.name
    if config.platform == ENSEMBLE or config.HasField("ensemble_scheduling"):
        return config
    if not config.backend:
        config.backend = PLATFORMS.get(config.platform, "") or _backend_of(config, path)
    if not config.default_model_filename and config.backend in FILES:
        config.default_model_filename = FILES[config.backend]
    return config


def _backend_of(config: ModelConfig, path: Path) -> str:
    """Return the backend that the file of a model implies; empty if none does."""
    if config.default_model_filename:
        return next((backend for backend, file in FILES.items() if file == config.default_model_filename), "")
    if config.platform:
        return ""
    versions = [entry for entry in _subfolders(path) if entry.name not in BESIDE_VERSIONS]
    for backend, file in FILES.items():
        if versions and (versions[0] / file).exists():
            return backend
    return path.name.partition(".")[2]  # the folder model.identity implies the backend identity
