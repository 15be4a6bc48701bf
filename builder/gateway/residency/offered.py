"""The models of a repository folder, loaded or not, as their config.pbtxt describes them."""

from __future__ import annotations

import asyncio
import os
import re
from dataclasses import dataclass
from pathlib import Path

from builder.errors import RepositoryError
from builder.gateway.errors import ApiError
from builder.gateway.models import CANDIDATE_OF, Model, read_model, unknown
from builder.triton.render import parse
from builder.triton.versions import CONFIG, chosen, numbers

NAME = re.compile(r"[\w][\w.-]*")  # of a model: a folder's name, never a path

Stamp = tuple[int, int, int]  # of a config.pbtxt: it is replaced, in one rename, when another version is served


@dataclass(frozen=True)
class Offer:
    """A model as its config.pbtxt of `stamp` describes it; `model` is None for what is not for clients."""

    stamp: Stamp
    model: Model | None


class Offered:
    """The front models of `repository`. A file is read again when it has changed: each request looks."""

    def __init__(self, repository: Path) -> None:
        self.repository = repository
        self.offers: dict[str, Offer] = {}
        self.reading: asyncio.Task[None] | None = None

    async def get(self, name: str) -> Model:
        """The model of that name. Raises ApiError 404, or 503 where its configuration cannot be read."""
        model = self.offer(name).model
        if model is None:
            raise self._unknown(name)
        return model

    async def all(self) -> list[Model]:
        """Every model, by name; those whose configuration cannot be read are left out."""
        if self.reading is None or self.reading.done():
            self.reading = asyncio.ensure_future(asyncio.to_thread(self._read))
        await asyncio.shield(self.reading)
        offers = sorted(self.offers.items())
        return [offer.model for _, offer in offers if offer.model is not None]

    def offer(self, name: str) -> Offer:
        """A model, read again where its configuration has changed. Raises ApiError."""
        stamp, known = self.stamp(name), self.offers.get(name)
        if stamp is None:
            self.offers.pop(name, None)
            raise self._unknown(name)
        if known is None or known.stamp != stamp:
            known = self.offers[name] = self._parsed(name, stamp)
        return known

    def stamp(self, name: str) -> Stamp | None:
        """What changes with the configuration of a model; None where there is none."""
        if not NAME.fullmatch(name):
            return None
        try:
            found = os.stat(f"{self.repository}/{name}/{CONFIG}")
        except OSError:
            return None
        return found.st_mtime_ns, found.st_ino, found.st_size

    def _parsed(self, name: str, stamp: Stamp) -> Offer:
        try:
            config = parse((self.repository / name / CONFIG).read_text("utf-8"), name)
        except (RepositoryError, OSError, UnicodeDecodeError) as error:
            raise ApiError(503, f"{name} cannot be read: {error}", code="unavailable") from error
        served = max(chosen(config, numbers(self.repository / name)), default=None)
        hidden = config.name not in ("", name) or CANDIDATE_OF in config.parameters
        model = None if served is None or hidden else read_model(config, str(served))
        return Offer(stamp, model)

    def _read(self) -> None:
        for name in self._names():
            try:
                self.offer(name)
            except ApiError:
                continue  # its own request says why
        for gone in set(self.offers) - set(self._names()):
            self.offers.pop(gone, None)

    def _names(self) -> list[str]:
        return sorted(entry.name for entry in os.scandir(self.repository) if entry.is_dir())

    def _unknown(self, name: str) -> ApiError:
        known = [name for name, offer in sorted(self.offers.items()) if offer.model is not None]
        return unknown(name, known or self._names())
