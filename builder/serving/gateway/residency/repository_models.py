"""List the models of a repository folder, loaded or not, from their config.pbtxt."""

from __future__ import annotations

import asyncio
import errno
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from builder.common.errors import RepositoryError
from builder.repository.config.render import CONFIG, parse
from builder.repository.sharing.hosting import MODELS, hosted_repositories
from builder.repository.versions import numbers_by_policy, version_numbers
from builder.runtime.adapter_files import FOLDER, adapter_names
from builder.runtime.hosted import HOSTED
from builder.serving.gateway.catalogue import model_not_found
from builder.serving.gateway.errors import ApiError, unavailable
from builder.serving.gateway.served_model import CANDIDATE_OF, ServedModel, hosted_models, read_model

NAME = re.compile(r"[\w][\w.-]*")  # name of a model: a folder's name, never a path
ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG)  # on any other error the file may exist

Stamp = tuple[int, int, int]  # identifies a config.pbtxt, which one rename replaces when another version is served


@dataclass(frozen=True)
class ConfiguredModel:
    """A model as its config.pbtxt of `stamp` describes it; `model` is None if it is not for clients."""

    stamp: Stamp
    model: ServedModel | None


@dataclass(frozen=True)
class HostedModels:
    """Models of a shared front, from its hosted.json of `stamp`."""

    stamp: Stamp
    models: Mapping[str, ServedModel]


NO_MODELS = HostedModels((0, 0, 0), {})


class RepositoryModels:
    """Front models of `repository`. Each request checks for changed files, which are read again."""

    def __init__(self, repository: Path) -> None:
        self.repository = repository
        self.configured_models: dict[str, ConfiguredModel] = {}
        self.hosting: dict[str, HostedModels] = {}  # by shared front
        self.reading: asyncio.Task[None] | None = None

    async def get(self, name: str) -> ServedModel:
        """Return the model named `name`. Raises ApiError 404, or 503 if its configuration cannot be read."""
        if self.stamp(name) is None:
            return self._hosted(name)
        model = self.configured(name).model
        if model is None or model.is_shared_front:
            raise self._unknown(name)
        return model

    async def all(self) -> list[ServedModel]:
        """Return every model with a readable configuration, by name. Raises ApiError 503 for an unreadable folder."""
        if self.reading is None or self.reading.done():
            self.reading = asyncio.ensure_future(asyncio.to_thread(self._read))
        await asyncio.shield(self.reading)
        hosted_by = {front: self.hosting[front].models for front in self.hosting}
        models = {name: model for hosted in hosted_by.values() for name, model in hosted.items()} | self._own()
        return [models[name] for name in sorted(models)]

    async def adapter_names(self, model: ServedModel) -> list[str]:
        """Return the adapters beside the versions of a model, which need not be loaded."""
        return adapter_names(self.repository / model.name / FOLDER)

    def temporarily_unavailable(self) -> list[ServedModel]:
        """Return nothing: every model of the folder can be loaded."""
        return []

    def _own(self) -> dict[str, ServedModel]:
        """Return the models with their own front, as far as they were read."""
        models = {name: offer.model for name, offer in self.configured_models.items()}
        return {name: model for name, model in models.items() if model is not None and not model.is_shared_front}

    def _hosted(self, name: str) -> ServedModel:
        """Return a model that a shared front answers for. Raises ApiError 404."""
        for rescan in (False, True):
            if rescan:
                self.hosting.update(dict.fromkeys(map(_front_of, hosted_repositories(self.repository)), NO_MODELS))
            for front in list(self.hosting):
                model = self._read_hosting(front).get(name)
                if model is not None:
                    return model
        raise self._unknown(name)

    def _read_hosting(self, front: str) -> Mapping[str, ServedModel]:
        """Return the models of a shared front; read hosted.json again if it has changed."""
        path = self.repository / front / MODELS / HOSTED
        try:
            stamp, model = _stamp(path), self.configured(front).model
            if model is None:
                return {}
            if self.hosting[front].stamp != stamp:
                self.hosting[front] = HostedModels(stamp, hosted_models(model, path.read_text("utf-8")))
        except (ApiError, OSError, ValueError, KeyError):  # check reports the reason
            self.hosting.pop(front, None)
            return {}
        return self.hosting[front].models

    def configured(self, name: str) -> ConfiguredModel:
        """Return a model, read again if its configuration has changed. Raises ApiError."""
        stamp, known = self.stamp(name), self.configured_models.get(name)
        if stamp is None:
            self.configured_models.pop(name, None)
            raise self._unknown(name)
        if known is None or known.stamp != stamp:
            known = self.configured_models[name] = self._parsed(name, stamp)
        return known

    def stamp(self, name: str) -> Stamp | None:
        """Return a stamp that changes with a model's configuration; None if it has none. Raises ApiError 503."""
        if not NAME.fullmatch(name):
            return None
        try:
            return _stamp(f"{self.repository}/{name}/{CONFIG}")
        except OSError as error:
            if error.errno in ABSENT:
                return None
            raise _unreadable(name, error) from error

    def _parsed(self, name: str, stamp: Stamp) -> ConfiguredModel:
        try:
            config = parse((self.repository / name / CONFIG).read_text("utf-8"), name)
            there = version_numbers(self.repository / name)
        except (RepositoryError, OSError, UnicodeDecodeError) as error:
            raise _unreadable(name, error) from error
        served = max(numbers_by_policy(config, there), default=None)
        hidden = config.name not in ("", name) or CANDIDATE_OF in config.parameters
        model = None if served is None or hidden else read_model(config, str(served))
        return ConfiguredModel(stamp, model)

    def _read(self) -> None:
        for name in self._names():
            try:
                self.configured(name)
            except ApiError:
                continue  # a request for it reports the reason
        for removed in set(self.configured_models) - set(self._names()):
            self.configured_models.pop(removed, None)
        for repository in hosted_repositories(self.repository):
            self.hosting.setdefault(_front_of(repository), NO_MODELS)
        for front in list(self.hosting):
            self._read_hosting(front)

    def _names(self) -> list[str]:
        try:
            return sorted(entry.name for entry in os.scandir(self.repository) if entry.is_dir())
        except OSError as error:
            raise _unreadable(str(self.repository), error) from error

    def _unknown(self, name: str) -> ApiError:
        return model_not_found(name, sorted(self._own()) or self._names())


def _unreadable(name: str, error: Exception) -> ApiError:
    return unavailable(f"{name} cannot be read: {error}", None)


def _front_of(repository: Path) -> str:
    return repository.parent.name


def _stamp(path: Path | str) -> Stamp:
    status = os.stat(path)
    return status.st_mtime_ns, status.st_ino, status.st_size
