"""Switch a running Triton to another version of a model by model control, without failed requests.

Triton loads a version, lets it answer, and ends the earlier one when its last request is answered (core,
model_lifecycle.cc, OnLoadFinal and GetModel). A front calls the engine of its own version, so the engine gets both
versions before the front changes, and drops the old one after the front's last request of the old version. From release
24.09 on, versions that are already loaded are not loaded again for that.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import tritonclient.grpc as grpc
from google.protobuf.json_format import MessageToJson
from tritonclient.utils import InferenceServerException

from builder.common.errors import ServeError
from builder.repository.config.render import CONFIG, parse
from builder.repository.versions import (
    entry_names,
    front_of,
    is_front,
    one_config,
    restore,
    served_number,
    version_numbers,
    with_versions,
)

LOADED_STATES = ("READY", "LOADING", "UNLOADING")
INDEX_TIMEOUT_S = 60.0
LOAD_TIMEOUT_S = 600.0
DRAIN_TIMEOUT_S = 600.0  # for the last request of a version, such as a stream
POLL_S = 0.1


def versions_in(client: grpc.InferenceServerClient, model: str, states: Collection[str], timeout_s: float) -> set[int]:
    """Return the versions of a model on a server that are in one of `states`. Raises InferenceServerException."""
    index = client.get_model_repository_index(client_timeout=timeout_s).models
    return {int(entry.version) for entry in index if entry.name == model and entry.version and entry.state in states}


class Control:
    """Model control of one server on one repository. Raises ServeError for every refusal of the server."""

    def __init__(self, url: str, repository: Path) -> None:
        self.url, self.repository = url, repository
        self._client = grpc.InferenceServerClient(url)

    def __enter__(self) -> Control:
        return self

    def __exit__(self, *error: object) -> None:
        self._client.close()

    def versions(self, model: str, states: Collection[str] = LOADED_STATES) -> set[int]:
        """Return the versions of a model on the server that are in one of `states`."""
        try:
            return versions_in(self._client, model, states, INDEX_TIMEOUT_S)
        except InferenceServerException as error:
            raise ServeError(
                f"no Triton answers at {self.url}: {server_reason(error)}; start one: build-repo serve"
            ) from error

    def switch(self, name: str) -> int:
        """Serve the version of `name` that the repository names. Returns it once no other version is left."""
        number = served_number(self.repository / name)
        if number is None:
            raise ServeError(
                f"{self.repository} has no version of {name} to serve; build-repo versions {name} shows those it has"
            )
        _, *engines = entry_names(self.repository, name, number)
        before = self.versions(name) - {number}
        with_both = {engine: self.add(engine, number, before) for engine in engines}
        try:
            self.load(name)
        except ServeError:
            for engine, others in with_both.items():
                self.load(engine, others or {number})
            raise
        if number not in self.versions(name, ("READY",)):
            raise ServeError(
                f"the server at {self.url} does not read {self.repository.resolve()}; name its own with --repository"
            )
        for engine, others in with_both.items():
            if others:
                self.wait(name, {number})
                self.only(engine, {number})
        return number

    @contextmanager
    def agreeing(self, name: str, before: int | None) -> Iterator[None]:
        """Keep repository and server in agreement: if the block, which switches `name`, fails, roll back if needed.

        The repository then names the version that the server answers with. It names `before` if that version is
        unknown, or if the server did not answer with `before` at first: the server may have another repository. The
        server may have switched all the same, while its last version still has requests.
        """
        agreed = False
        try:
            agreed = before in self.versions(name, ("READY",))
            yield
        except BaseException:
            restore(self.repository, name, self._answering(name, before) if agreed else before)
            raise

    def _answering(self, name: str, before: int | None) -> int | None:
        """Return the version that answers, or that is being loaded."""
        try:
            loading, ready = (self.versions(name, (state,)) for state in ("LOADING", "READY"))
        except ServeError:
            return before
        return max(loading or ready, default=before)

    def again(self, model: str) -> None:
        """Load a model that was unloaded: a front with its engine's version, an engine with those that fronts call."""
        entry = self.repository / model
        number = served_number(entry)
        if number is None or not is_front(entry):
            front = front_of(entry)
            called = self.versions(front, ("READY",)) & set(version_numbers(entry)) if front else set()
            self.load(model, {number, *called} if number and called else None)
            return
        for engine in entry_names(self.repository, model, number)[1:]:
            if number not in self.versions(engine, ("READY",)):
                self.load(engine)
        self.load(model)

    def add(self, engine: str, number: int, before: Collection[int]) -> set[int]:
        """Load version `number` of an engine, keeping the loaded ones of `before`, which are returned."""
        others = self.versions(engine) & set(before)
        for other in others:
            if not one_config(self.repository / engine, number, other):
                raise ServeError(
                    f"versions {other} and {number} of {engine} differ in their backend, tensors or max_batch_size, "
                    "and Triton has one config.pbtxt for both: start the server again instead"
                )
        self.load(engine, {*others, number})
        return others

    def load(self, model: str, versions: Collection[int] | None = None) -> None:
        """Load a model as its config.pbtxt says, or with `versions` in place of the one that it names."""
        config = None
        if versions is not None:
            text = with_versions((self.repository / model / CONFIG).read_bytes(), sorted(versions))
            config = MessageToJson(parse(text.decode(), model), preserving_proto_field_name=True, indent=None)
        try:
            self._client.load_model(model, config=config, client_timeout=LOAD_TIMEOUT_S)
        except InferenceServerException as error:
            advice = ""
            if "explicit model load / unload is not allowed" in str(error.message()):
                advice = "; start it with --model-control-mode=explicit, as build-repo serve does"
            raise ServeError(
                f"{model} is not loaded by the server at {self.url}: {server_reason(error)}{advice}"
            ) from error

    def unload(self, model: str, patience_s: float = DRAIN_TIMEOUT_S) -> None:
        """Unload a model and wait until no version is left."""
        try:
            self._client.unload_model(model, client_timeout=LOAD_TIMEOUT_S)
        except InferenceServerException as error:
            raise ServeError(f"{model} is not unloaded by the server at {self.url}: {server_reason(error)}") from error
        self.wait(model, (), patience_s)

    def only(self, model: str, versions: Collection[int]) -> None:
        """Load exactly `versions` of a model, and wait until no other is left."""
        self.load(model, versions)
        self.wait(model, versions)

    def wait(self, model: str, versions: Collection[int], patience_s: float = DRAIN_TIMEOUT_S) -> None:
        """Wait until no versions of a model but `versions` are left."""
        end = time.monotonic() + patience_s
        while left := self.versions(model) - set(versions):
            if time.monotonic() > end:
                raise ServeError(
                    f"version {min(left)} of {model} still has requests after {patience_s:.0f} s: it, and its engine, "
                    "stay loaded until these end, or until the server is started again if Triton lost one"
                )
            time.sleep(POLL_S)


def server_reason(error: InferenceServerException) -> str:
    """Return the server's error message in one line."""
    return str(error.message()).strip().splitlines()[0]
