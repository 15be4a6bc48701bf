"""hosted.json: the models that a shared front hosts, and their versions. It lies in the repository of those models.

The folder `models` of a shared front is a repository like any other, which Triton does not look into: the same commands
build models into it, roll them back and remove them. Each change of what answers ends by replacing hosted.json in one
rename; the shared front then reads it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tritonclient.grpc import model_config_pb2

from builder.common.errors import RepositoryError
from builder.repository.config.render import CONFIG, has_input, parse
from builder.repository.report.record import REPORT
from builder.repository.transaction import RepositoryChange
from builder.runtime.adapter_files import ADAPTER
from builder.runtime.contract import ContractError, EncoderServing, load
from builder.runtime.hosted import HOSTED, Hosted, HostedModel, dump_hosted

MODELS = "models"  # the folder
FRONT = "encoder/front.py"  # the file of a version that a shared front opens
NAMES_THE_MODEL, LISTS = "model", "models"  # tensors of a shared front that no task has


def hosted_repositories(repository: Path) -> Iterator[Path]:
    """Yield the repositories of the shared fronts of `repository`."""
    yield from (path.parent for path in sorted(repository.glob(f"*/{MODELS}/{HOSTED}")))


def refuse_hosted(repository: Path, name: str) -> None:
    """Raise RepositoryError if a shared front of `repository` hosts `name`: its next version belongs there."""
    for hosting in hosted_repositories(repository):
        if (hosting / name).is_dir():
            front = hosting.parent.name
            raise RepositoryError(
                f"{front} hosts {name}: its versions are in the repository {hosting}, the next one too. To give it a "
                f"front of its own again: build-repo unshare {name} --name {front} --repository {repository}"
            )


def note(change: RepositoryChange, repository: Path, name: str, version: int | None) -> None:
    """Record in hosted.json that version `version` of a model answers; None: no version does.

    Does nothing unless `repository` is that of a shared front. Raises RepositoryError for a model that the shared front
    cannot host.
    """
    if not (repository / HOSTED).is_file():
        return
    entries = dict(read_hosted(repository).entries)
    entries.pop(name, None)
    if version is not None:
        entries[name] = hosted_model(repository / name, version)
        refuse_misfit(config_of(repository.parent), config_of(repository / name, version))
    change.write(dump_hosted(entries).encode(), repository / HOSTED)


def read_hosted(repository: Path) -> Hosted:
    """Read hosted.json. Raises RepositoryError if it cannot be read."""
    try:
        return Hosted(repository)
    except ContractError as error:
        raise RepositoryError(str(error)) from error


def hosted_model(entry: Path, version: int) -> HostedModel:
    """Return the entry of a version in hosted.json. Raises RepositoryError for one that no shared front can host."""
    name, folder = entry.name, entry / str(version)
    try:
        serving = load(folder)
    except ContractError as error:
        raise RepositoryError(str(error)) from error
    if not isinstance(serving, EncoderServing):
        raise RepositoryError(f"{name} generates text, and a shared front hosts encoders: leave it a front of its own")
    if serving.executor == "bls":
        raise RepositoryError(
            f"{name} calls its engine {serving.engine} through BLS, and a shared front runs engines in its own "
            "process: build it again with --executor in-process"
        )
    if not (folder / FRONT).is_file() or not (folder / CONFIG).is_file():
        raise RepositoryError(
            f"version {version} of {name} is of an earlier build-repo, before shared fronts: build it again"
        )
    config = config_of(entry, version)
    if has_input(config, ADAPTER.name):
        raise RepositoryError(f"{name} was built with --adapters, which a shared front does not have: leave it its own")
    return HostedModel(
        version=version,
        build=hashlib.sha256((folder / REPORT).read_bytes()).hexdigest()[:16],
        inputs={field.name: field.optional for field in config.input},
        outputs={field.name: tuple(field.dims) for field in config.output},
        parameters={key: value.string_value for key, value in sorted(config.parameters.items())},
        max_batch_size=config.max_batch_size,
    )


def refuse_other(hosted: Hosted, name: str, repository: Path) -> None:
    """Raise RepositoryError if hosted.json contradicts the files of a model.

    Raises ContractError if hosted.json is damaged.
    """
    entry = repository / name
    if Path(name).name != name or not (entry / str(hosted[name].version)).is_dir():
        raise RepositoryError(
            f"{HOSTED} names version {hosted[name].version} of {name}, which is not there: share it again"
        )
    if hosted_model(entry, hosted[name].version) != hosted[name]:
        raise RepositoryError(f"{HOSTED} says of {name} what its files do not: share it again, build-repo share")


def config_of(entry: Path, version: int | None = None) -> Any:
    """Return the ModelConfig of a model, or of one of its versions. Raises RepositoryError."""
    path = (entry if version is None else entry / str(version)) / CONFIG
    try:
        return parse(path.read_text("utf-8"), entry.name)
    except OSError as error:
        raise RepositoryError(f"{path} cannot be read: {error.strerror or error}") from error


def refuse_misfit(front: Any, model: Any) -> None:
    """Raise RepositoryError unless the shared front `front` has the task and the tensors of `model`."""
    tasks = [config.parameters["task"].string_value for config in (front, model)]
    if tasks[0] != tasks[1]:
        raise RepositoryError(
            f"{model.name} is for {tasks[1]}, and the shared front {front.name} for {tasks[0]}: share it under another "
            "--name"
        )
    sides = (("input", front.input, model.input), ("output", front.output, model.output))
    for side, of_front, of_model in sides:
        known = {field.name: field for field in of_front}
        for field in of_model:
            other = known.get(field.name)
            fits = other is not None and other.data_type == field.data_type and has_shape(field.dims, other.dims)
            if not fits:
                raise RepositoryError(
                    f"{model.name} has the {side} {_shown(field)}, and the shared front {front.name} "
                    f"{'has none of that name' if other is None else _shown(other)}: share it under another --name"
                )
    missing = {field.name for field in front.output} - {field.name for field in model.output} - {LISTS}
    if missing:
        raise RepositoryError(
            f"{model.name} does not answer {min(missing)}, as the shared front {front.name} does: share it under "
            "another --name"
        )


def has_shape(dims: Sequence[int], declared: Sequence[int]) -> bool:
    """Return True if a tensor of `dims` is one of the `declared` shape, in which -1 is any size."""
    return len(dims) == len(declared) and all(size in (-1, own) for own, size in zip(dims, declared, strict=True))


def _shown(field: Any) -> str:
    kind = model_config_pb2.DataType.Name(field.data_type).removeprefix("TYPE_")
    return f"{field.name} {kind}{list(field.dims)}"
