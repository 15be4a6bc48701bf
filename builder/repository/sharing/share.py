"""Share a front: move built encoders from their own fronts into one process that serves all of them, and back.

NAME/            the shared front, all that Triton sees
  config.pbtxt   the tensors of its task, and `model`, which names the model of a request
  1/             its emitted Python and serving.json
  models/        a repository: the models as they were built, each with its versions, and hosted.json
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import Any

from tritonclient.grpc import model_config_pb2

from builder.common.errors import RepositoryError
from builder.common.releases import SENDERS_SINCE, version_tuple
from builder.engines.placement import InstanceGroup
from builder.options import Serving
from builder.options.build_spec import misnamed
from builder.repository.check import check
from builder.repository.config.entries import Config, RepositoryEntry
from builder.repository.config.render import CONFIG, parse, render
from builder.repository.layout.emitted import emitted_files
from builder.repository.locks import locked, write_synced
from builder.repository.publish import move_in
from builder.repository.report.record import read_report
from builder.repository.sharing.hosting import (
    LISTS,
    MODELS,
    NAMES_THE_MODEL,
    config_of,
    hosted_model,
    read_hosted,
    refuse_misfit,
)
from builder.repository.transaction import RepositoryChange, changing
from builder.repository.versions import activate, callers_by_model, require_front, served_number, version_numbers
from builder.runtime.contract import FILE, ContractError, SharedServing, dump, load_shared
from builder.runtime.fields import Field
from builder.runtime.hosted import HOSTED, HostedModel, dump_hosted

MEMORY_MB = 2048


def share(repository: Path, name: str, models: Sequence[str], memory_mb: int | None = None) -> list[str]:
    """Move `models` of `repository` into the shared front `name`; return all models that it hosts.

    `memory_mb`: the most memory of its process, in 2^20 bytes; by default as before, or MEMORY_MB. Raises
    RepositoryError; the repository is then as before.
    """
    wrong = misnamed(name)
    if wrong is not None:
        raise RepositoryError(wrong)
    if memory_mb is not None and memory_mb < 1:
        raise RepositoryError(f"{memory_mb} MB is not memory for a process: give at least 1 (--memory-mb)")
    front = repository / name
    callers = callers_by_model(repository)
    hosted = {
        model: _hosted_as(repository, name, model, callers.get(model, set()) - {model})
        for model in dict.fromkeys(models)
    }
    entry = _entry(front, [config_of(repository / model, hosted[model].version) for model in hosted], memory_mb)
    with _locked_models(front), changing(repository) as change:
        _serve_as(change, repository, entry)
        entries = dict(read_hosted(front / MODELS).entries)
        for model in hosted:
            change.move(repository / model, front / MODELS / model)
        entries.update(hosted)
        change.write(dump_hosted(entries).encode(), front / MODELS / HOSTED)
    return sorted(entries)


def unshare(repository: Path, name: str, models: Sequence[str]) -> list[str]:
    """Move `models` out of the shared front `name`, each to a front of its own; return those that it still hosts.

    Raises RepositoryError; the repository is then as before.
    """
    front = repository / name
    if not (front / MODELS / HOSTED).is_file():
        raise RepositoryError(f"{name} is not a shared front of {repository}; `build-repo share` makes one")
    with _locked_models(front), changing(repository) as change:
        entries = dict(read_hosted(front / MODELS).entries)
        for model in dict.fromkeys(models):
            if model not in entries:
                raise RepositoryError(f"{name} does not host {model}; it hosts {', '.join(entries) or 'none'}")
            if (repository / model).exists():
                raise RepositoryError(f"{repository} has a model {model} already: remove or rename it first")
            del entries[model]
        change.write(dump_hosted(entries).encode(), front / MODELS / HOSTED)  # first: no reader opens what moves
        for model in dict.fromkeys(models):
            change.move(front / MODELS / model, repository / model)
    return sorted(entries)


def _locked_models(front: Path) -> contextlib.AbstractContextManager[None]:
    """Lock the models of a shared front against other changes. A new front has none."""
    return locked(front / MODELS) if (front / MODELS).is_dir() else contextlib.nullcontext()


def _hosted_as(repository: Path, front: str, name: str, callers: Set[str]) -> HostedModel:
    """Return the entry in hosted.json of a model that moves in. Raises RepositoryError if it cannot.

    `callers`: the other models that call it.
    """
    if (repository / front / MODELS / name).exists():
        raise RepositoryError(
            f"{front} hosts {name} already; build its next version there: build-repo MODEL --name {name} "
            f"--output {repository / front / MODELS}"
        )
    require_front(repository, name)
    if callers:
        raise RepositoryError(f"{name} is called by {', '.join(sorted(callers))}, which would not find it any more")
    version = served_number(repository / name)
    if version is None:
        raise RepositoryError(f"no version of {name} is served; build-repo versions {name} shows them")
    release = read_report(repository, name).triton
    if version_tuple(release) < version_tuple(SENDERS_SINCE):
        raise RepositoryError(
            f"{name} was built for Triton {release}; a shared front answers requests after others, which Triton does "
            f"since {SENDERS_SINCE}: build it with --triton {SENDERS_SINCE} or later"
        )
    return hosted_model(repository / name, version)


def _entry(front: Path, configs: Sequence[Any], memory_mb: int | None) -> RepositoryEntry:
    """Return the shared front with the new models, as version 1."""
    if (front / CONFIG).is_file():
        own, memory = config_of(front), _shared(front).memory_mb
        for config in configs:
            refuse_misfit(own, config)
        config = _config(
            front.name, own.parameters["task"].string_value, [own], max(c.max_batch_size for c in (own, *configs))
        )
    elif front.exists():
        raise RepositoryError(f"{front} is there already and is not a shared front: choose another --name")
    elif not configs:
        raise RepositoryError(f"{front.name} has no models yet: name those that it is to answer for")
    else:
        memory, task = MEMORY_MB, configs[0].parameters["task"].string_value
        config = _config(front.name, task, configs, max(config.max_batch_size for config in configs))
        parsed = parse(render(config), config.name)
        for other in configs:
            refuse_misfit(parsed, other)
    queue = config.serving.queue
    serving = SharedServing(config.parameters["task"], MODELS, memory_mb or memory, queue.size, queue.waiting_ms)
    files: dict[str, bytes | Path] = {**emitted_files("shared_model.py"), f"1/{FILE}": dump(serving).encode()}
    return RepositoryEntry(front.name, config, files)


def _shared(front: Path) -> SharedServing:
    try:
        return load_shared(front / str(served_number(front)))
    except ContractError as error:
        raise RepositoryError(f"{front.name} is not a shared front: {error}. Choose another --name") from error


def _config(name: str, task: str, configs: Sequence[Any], batch: int) -> Config:
    """Return a configuration with the inputs of all `configs`, and the outputs of the first, of any size."""
    fields = [_field(field) for config in reversed(configs) for field in config.input]
    inputs = {field.name: replace(field, optional=True) for field in fields if field.name != NAMES_THE_MODEL}
    outputs = [
        replace(_field(field), dims=tuple(size if size == 1 else -1 for size in field.dims))
        for field in configs[0].output
        if field.name != LISTS
    ]
    return Config(
        name=name,
        backend="python",
        max_batch_size=batch,
        inputs=[Field(NAMES_THE_MODEL, "TYPE_STRING"), *inputs.values()],
        outputs=[*outputs, Field(LISTS, "TYPE_STRING")],
        groups=(InstanceGroup(1),),
        serving=Serving(),
        dynamic_batching=True,
        parameters={"task": task, "shared": "true"},
    )


def _field(entry: Any) -> Field:
    kind = model_config_pb2.DataType.Name(entry.data_type)
    return Field(entry.name, kind, tuple(entry.dims))


def _serve_as(change: RepositoryChange, repository: Path, entry: RepositoryEntry) -> None:
    """Serve a shared front as `entry` describes it: as a new version, unless the served version is already the same."""
    front = repository / entry.name
    served = served_number(front) if front.exists() else None
    if served is not None:
        files = _contents(entry.at(served))
        if all((front / path).is_file() and (front / path).read_bytes() == files[path] for path in files):
            return
    number = 1 + max(version_numbers(front), default=0)
    staged = change.staging / "new" / entry.name
    files = _contents(entry.at(number))
    files[f"{number}/{CONFIG}"] = files[CONFIG]
    if served is None:
        files[f"{MODELS}/{HOSTED}"] = dump_hosted({}).encode()
    for path, content in files.items():
        write_synced(staged / path, content)
    problems = check(staged.parent)
    if problems:
        raise RepositoryError(f"the shared front would not load: {problems[0]}. Nothing was changed")
    move_in(change, staged, front, number)
    activate(change, repository, [entry.name], number)


def _contents(entry: RepositoryEntry) -> dict[str, bytes]:
    """Return the contents of the entry's files, its configuration among them."""
    files = {path: file if isinstance(file, bytes) else file.read_bytes() for path, file in entry.files.items()}
    return {**files, CONFIG: render(entry.config).encode()}
