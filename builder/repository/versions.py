"""Versions of a model: those that exist, those that Triton loads, and the change to another served version.

A model is a front and, where its engine is a Triton model of its own, that too; version N of the front calls version N
of the engine. The files beside the version folders are copies of the served version's, and their version_policy names
that version. Replacing the front's config.pbtxt switches versions, the engine's too: the engine's policy has both
versions meanwhile, or its config.pbtxt is replaced by the same rename. Triton has one config.pbtxt for all versions of
a model; each version keeps its own, and the served version's applies.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from builder.common.errors import RepositoryError
from builder.common.files import clone
from builder.repository.config.render import CONFIG, parse
from builder.repository.locks import sync
from builder.repository.report.bom import BOM
from builder.repository.report.page import PAGE
from builder.repository.report.record import REPORT, BuildReport, read_object, read_report
from builder.repository.sharing.hosting import hosted_repositories, note
from builder.repository.transaction import RepositoryChange, changing
from builder.runtime.contract import FILE

BESIDE = (REPORT, PAGE, BOM, CONFIG)  # of the served version, copied beside the version folders; the last one switches
CHANGING = "changing"  # folder in a front while it and an engine switch together
OVERLAP_S = 1.0  # a server that starts reads the front's configuration, then the engine's
SHARED = ("backend", "platform", "max_batch_size", "default_model_filename", "input", "output")


@dataclass(frozen=True)
class PublishedVersion:
    """One version of a model. `size`: bytes of all its files; `published`: seconds since 1970."""

    number: int
    is_served: bool
    published: float
    size: int
    report: BuildReport


def version_numbers(entry: Path) -> list[int]:
    """Return the versions of a model of the repository, in order."""
    names = (path.name for path in entry.iterdir() if path.is_dir()) if entry.is_dir() else ()
    return sorted(int(name) for name in names if name.isdecimal() and not name.startswith("0"))


def loaded_numbers(entry: Path) -> list[int]:
    """Return the versions that Triton loads by the model's version_policy.

    Raises RepositoryError for a config.pbtxt that cannot be parsed.
    """
    path = entry / CONFIG
    if not path.is_file():
        return []
    return numbers_by_policy(parse(path.read_text("utf-8"), entry.name), version_numbers(entry))


def numbers_by_policy(config: ModelConfig, numbers: Sequence[int]) -> list[int]:
    """Return those of `numbers`, in order, that the version_policy of `config` names."""
    policy = config.version_policy
    if policy.HasField("specific"):
        return [number for number in numbers if number in policy.specific.versions]
    return list(numbers) if policy.HasField("all") else list(numbers[-max(1, policy.latest.num_versions) :])


def served_number(entry: Path) -> int | None:
    """Return the version that answers requests without a version: the newest of those that Triton loads."""
    return max(loaded_numbers(entry), default=None)


def newest_first(repository: Path, name: str) -> list[PublishedVersion]:
    """Return the versions of a model, the newest first.

    Raises RepositoryError if there is no such model, or its files cannot be read.
    """
    require_front(repository, name)
    entry = repository / name
    served = served_number(entry)
    versions = []
    for number in reversed(version_numbers(entry)):
        folders = [repository / part / str(number) for part in entry_names(repository, name, number)]
        size = sum(path.stat().st_size for folder in folders for path in folder.rglob("*") if path.is_file())
        report = read_report(entry, str(number)) if _has_config(entry, number) else read_report(repository, name)
        published = (entry / str(number)).stat().st_mtime
        versions.append(PublishedVersion(number, number == served, published, size, report))
    return versions


def entry_names(repository: Path, name: str, number: int) -> list[str]:
    """Return the entries of a version: the front, then its engine if that is a Triton model of its own."""
    return [name, *sorted(entry for entry in _files(repository / name, number) if entry != name)]


def require_front(repository: Path, name: str) -> None:
    """Raise RepositoryError if the repository has no such front model."""
    if is_front(repository / name):
        return
    fronts = [path.parent.name for path in sorted(repository.glob(f"*/{REPORT}")) if is_front(path.parent)]
    for front in fronts:
        if name in _files(repository / front, served_number(repository / front) or 0):
            raise RepositoryError(f"{name} is the engine of {front}, and changes with it: name {front}")
    for hosting in hosted_repositories(repository):
        if (hosting / name).is_dir():
            raise RepositoryError(
                f"{repository} has no model {name}; {hosting.parent.name} hosts it: --repository {hosting}"
            )
    raise RepositoryError(f"{repository} has no model {name}; it has {', '.join(fronts) or 'none'} (--repository)")


def is_front(entry: Path) -> bool:
    """Return True if a model was built under this name: the report beside an engine names its front."""
    return front_of(entry) == entry.name


def front_of(entry: Path) -> str | None:
    """Return the name that a model was built under: its own, or that of the front that calls it; None if unknown."""
    name: str | None = read_object(entry / REPORT).get("name")
    return name


def restore(repository: Path, name: str, number: int | None) -> None:
    """Serve version `number`, if the model has it and serves another. Raises RepositoryError."""
    entry = repository / name
    if number in version_numbers(entry) and number != served_number(entry):
        rollback(repository, name, number)


def rollback(repository: Path, name: str, number: int | None = None) -> int:
    """Serve version `number`, by default the one before the served version, and return it.

    Raises RepositoryError if there is no such version; the repository is then as before.
    """
    require_front(repository, name)
    numbers, served = version_numbers(repository / name), served_number(repository / name)
    if number is None:
        number = max((n for n in numbers if served is not None and n < served), default=None)
    if number not in numbers or not _has_config(repository / name, number):
        requested = "earlier version" if number is None else f"version {number}"
        raise RepositoryError(
            f"{name} has no {requested} to go back to; it has {', '.join(map(str, numbers))}, and {served} is served"
        )
    with changing(repository, name) as change:
        activate(change, repository, entry_names(repository, name, number), number)
    return number


def activate(change: RepositoryChange, repository: Path, names: Sequence[str], number: int) -> None:
    """Serve version `number` of a model. `names`: its entries, the front first."""
    front, *engines = [repository / name for name in names]
    changed = [engine for engine in engines if served_number(engine) not in (None, number)]
    overlapping = [engine for engine in changed if one_config(engine, served_number(engine), number)]
    for engine in engines:
        served = served_number(engine)
        if engine in overlapping and served is not None:
            _put_beside(change, engine, number, [served, number])
        elif engine not in changed:
            _put_beside(change, engine, number, [number])
    _switch(change, [front, *(engine for engine in changed if engine not in overlapping)], number)
    if overlapping:
        time.sleep(OVERLAP_S)
    for engine in overlapping:
        _put_beside(change, engine, number, [number])
    note(change, repository, front.name, number)


def _switch(change: RepositoryChange, entries: Sequence[Path], number: int) -> None:
    """Switch the front, the first of `entries`, and engines that cannot load both versions, in one moment.

    Triton reads the configurations of all models before it loads any (core, model_repository_manager.cc, PollModels).
    """
    files = {path: content for entry in entries for path, content in _beside(entry, number, [number]).items()}
    configs = {entry / CONFIG: files.pop(entry / CONFIG) for entry in entries}
    for path, content in files.items():
        change.write(content, path)
    change.write_at_once(configs, entries[0] / CHANGING)


def _put_beside(change: RepositoryChange, entry: Path, number: int, versions: Sequence[int]) -> None:
    for target, content in _beside(entry, number, versions).items():
        change.write(content, target)


def _beside(entry: Path, number: int, versions: Sequence[int]) -> dict[Path, bytes]:
    """Return the files beside the version folders when `number` is served and Triton loads `versions`, in order."""
    sources = [entry / str(number) / name for name in BESIDE]
    contents = {entry / source.name: source.read_bytes() for source in sources if source.is_file()}
    if entry / CONFIG in contents:
        contents[entry / CONFIG] = with_versions(contents[entry / CONFIG], versions)
    return contents


def with_versions(config: bytes, versions: Sequence[int]) -> bytes:
    """Return `config` with a version_policy of `versions`."""
    parsed = parse(config.decode(), "it")
    if list(parsed.version_policy.specific.versions) == list(versions):
        return config
    del parsed.version_policy.specific.versions[:]
    parsed.version_policy.specific.versions.extend(versions)
    return text_format.MessageToString(parsed).encode()


def as_candidate(config: bytes, name: str, of: str) -> bytes:
    """Return `config` under another name, with a parameter that names the model `of` it may replace."""
    parsed = parse(config.decode(), name)
    parsed.name = name
    parsed.parameters["candidate_of"].string_value = of
    return text_format.MessageToString(parsed).encode()


def one_config(entry: Path, *versions: int | None) -> bool:
    """Return True if one config.pbtxt fits all these versions: they agree in every field of SHARED."""
    configs = [parse((entry / str(number) / CONFIG).read_text("utf-8"), entry.name) for number in versions]
    return all(getattr(config, field) == getattr(configs[0], field) for config in configs for field in SHARED)


def copy_beside(entry: Path, number: int) -> None:
    """Copy the files of a staged version beside its folder, and flush the entry's folders to the disk."""
    for name in BESIDE:
        if (entry / str(number) / name).is_file():
            clone(entry / str(number) / name, entry / name)
            sync(entry / name)
    for folder in (entry, *(path for path in entry.rglob("*") if path.is_dir())):
        sync(folder)


def adopt(change: RepositoryChange, entry: Path) -> None:
    """Copy the files beside the version folders into the served version, which an earlier build-repo did not."""
    served = served_number(entry)
    if served is None or _has_config(entry, served):
        return
    for name in BESIDE:
        if (entry / name).is_file():
            content = (entry / name).read_bytes()
            content = with_versions(content, [served]) if name == CONFIG else content
            change.write(content, entry / str(served) / name)
            change.write(content, entry / name)


def prune(repository: Path, name: str, staging: Path, keep: int, also: Sequence[int | None]) -> None:
    """Move all versions of a model but `keep` to `staging`: `also` stay first, then the newest.

    An engine goes with the last version that calls it, unless another model does.
    """
    front = repository / name
    in_order = dict.fromkeys([*(n for n in also if n is not None), *reversed(version_numbers(front))])
    remaining = list(in_order)[: max(keep, 1)]
    engines, called = _engines(repository, name), _engines(repository, name, remaining)
    for entry in [front, *(repository / engine for engine in sorted(engines))]:
        if entry != front and entry.name not in called and not callers(repository, entry.name, name):
            entry.rename(staging / entry.name)
            continue
        for number in set(version_numbers(entry)) - set(remaining):
            for folder in (entry / str(number), entry / "warmup" / str(number)):
                if folder.is_dir():
                    folder.rename(staging / f"{entry.name}.{folder.parent.name}.{number}")
    sync(repository)


def remove(repository: Path, name: str) -> list[str]:
    """Remove a model from the repository, with its engine unless another model calls that; return the removed models.

    Raises RepositoryError if there is no such model, or another one calls it.
    """
    require_front(repository, name)
    using = callers(repository, name, name)
    if using:
        raise RepositoryError(f"{name} is called by {', '.join(using)}: remove that first")
    with changing(repository, name) as change:
        engines = sorted(_engines(repository, name))
        removed = [name, *(engine for engine in engines if not callers(repository, engine, name))]
        for entry in removed:
            change.move(repository / entry, change.staging / entry)
        note(change, repository, name, None)
    return removed


def _engines(repository: Path, name: str, numbers: Sequence[int] | None = None) -> set[str]:
    """Return the engines of the versions `numbers` of a model; of all its versions if None."""
    numbers = version_numbers(repository / name) if numbers is None else numbers
    return {engine for number in numbers for engine in entry_names(repository, name, number)[1:]}


def callers(repository: Path, called: str, apart_from: str) -> list[str]:
    """Return the models, except `apart_from` and itself, that call the model `called`: fronts and ensembles."""
    return sorted(callers_by_model(repository).get(called, set()) - {called, apart_from})


def callers_by_model(repository: Path) -> dict[str, set[str]]:
    """Return the models that call each called model: fronts and ensembles. Reads every model once."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    for path in repository.glob(f"*/{CONFIG}"):
        for called in _calls(path.parent):
            found[called].add(path.parent.name)
    return dict(found)


def _calls(entry: Path) -> Iterator[str]:
    config = parse((entry / CONFIG).read_text("utf-8"), entry.name)
    yield from (step.model_name for step in config.ensemble_scheduling.step)
    for serving in entry.glob(f"*/{FILE}"):
        yield str(read_object(serving).get("engine"))


def _has_config(entry: Path, number: int) -> bool:
    """Return True if a version has its own copy of the files beside the version folders."""
    return (entry / str(number) / CONFIG).is_file()


def _files(entry: Path, number: int) -> Mapping[str, Any]:
    """Return the files of a version by model, for models that exist."""
    own = entry / str(number) / REPORT
    files: Mapping[str, Any] = read_object(own if own.is_file() else entry / REPORT).get("files", {})
    return {name: files[name] for name in files if (entry.parent / name / str(number)).is_dir()}
