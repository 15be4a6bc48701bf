"""Switch one or several servers of a repository to another version of a model: all of them, or none."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from builder.common.errors import ServeError
from builder.repository.versions import restore, version_numbers
from builder.serving.gateway.fleet.targets import parse_targets, resolve
from builder.serving.server.control import Control


class Servers:
    """Servers at `urls`, each a HOST:PORT, several separated by commas, or dns:///NAME:PORT.

    They all have to read `repository`. Raises SpecError for other addresses, and ServeError for unknown names.
    """

    def __init__(self, urls: Sequence[str], repository: Path) -> None:
        self.repository = repository
        self.controls = [Control(url, repository) for url in _addresses(urls)]

    def __enter__(self) -> Servers:
        return self

    def __exit__(self, *error: object) -> None:
        for control in self.controls:
            control.__exit__(*error)

    def __str__(self) -> str:
        return ", ".join(control.url for control in self.controls)

    def running(self, name: str) -> int | None:
        """Return the version of a model that every server answers with; None for none. Raises ServeError."""
        running = {control.url: max(control.versions(name, ("READY",)), default=None) for control in self.controls}
        if len(set(running.values())) > 1:
            raise ServeError(
                f"the servers do not answer with one version of {name}: {self.states(name)}; change the others first: "
                f"build-repo rollback {name} VERSION --url HOST:PORT"
            )
        return next(iter(running.values()))

    def states(self, name: str) -> str:
        """Return which versions of a model each server answers with, for messages."""
        return ", ".join(f"{control.url} ({_state(control, name)})" for control in self.controls)

    def switch(self, name: str) -> None:
        """Serve the version of a model that the repository names, on one server after the other."""
        for control in self.controls:
            control.switch(name)

    @contextmanager
    def agreeing(self, name: str, before: int | None) -> Iterator[None]:
        """Keep repository and servers in agreement if the block, which switches `name`, fails.

        One server decides by what it answers with (Control.agreeing). Several go back to the version that they answer
        with now, and the repository to version `before`.
        """
        if len(self.controls) == 1:
            with self.controls[0].agreeing(name, before):
                yield
            return
        try:
            running = self._running_of_repository(name)
        except ServeError:
            restore(self.repository, name, before)
            raise
        try:
            yield
        except BaseException as error:
            others = self._go_back(name, running)
            restore(self.repository, name, before)
            if not others and not isinstance(error, ServeError):
                raise
            went = f"{', '.join(others)} did not go back" if others else "The servers went back"
            reason = str(error) or type(error).__name__
            raise ServeError(f"{reason}. {went} to version {running}: {self.states(name)}") from error

    def _running_of_repository(self, name: str) -> int:
        """Return the version that every server answers with. Raises ServeError if the repository does not have it."""
        running = self.running(name)
        if running is None or running not in version_numbers(self.repository / name):
            raise ServeError(
                f"the servers do not answer with a version of {name} that {self.repository} has: {self.states(name)}; "
                "start them on this repository, or name theirs with --repository"
            )
        return running

    def _go_back(self, name: str, running: int) -> list[str]:
        """Switch the servers that changed back to version `running`. Return the addresses of those that do not."""
        for control in self.controls:
            with suppress(ServeError):
                if control.versions(name) != {running}:
                    restore(self.repository, name, running)
                    control.switch(name)
        return [control.url for control in self.controls if not _answers_with(control, name, running)]


def _addresses(urls: Sequence[str]) -> list[str]:
    """Return the address of each server. Raises ServeError for a name that is not resolved."""

    async def all_addresses() -> list[str]:
        targets = parse_targets(",".join(urls))
        return [address for found in await asyncio.gather(*map(resolve, targets)) for address in found]

    try:
        return list(dict.fromkeys(asyncio.run(all_addresses())))
    except OSError as error:
        raise ServeError(f"{', '.join(urls)} is not resolved: {error}") from error


def _state(control: Control, name: str) -> str:
    try:
        versions = control.versions(name, ("READY",))
    except ServeError:
        return "does not answer"
    return f"version {', '.join(map(str, sorted(versions)))}" if versions else "not loaded"


def _answers_with(control: Control, name: str, number: int) -> bool:
    """Return True if a server answers with this version and no other."""
    try:
        return control.versions(name, ("READY",)) == {number}
    except ServeError:
        return False
