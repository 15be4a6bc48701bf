"""Credentials of registries, as `docker login` stores them: config.json, or a helper program that it names."""

from __future__ import annotations

import base64
import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from builder.common.errors import RepositoryError, first_line
from builder.common.registry_address import DOCKER_HUB

DOCKER_HUB_KEY = "https://index.docker.io/v1/"
TOKEN_USER = "<token>"  # user name by which a helper says that its secret is an identity token
HELPER_TIMEOUT_S = 30


@dataclass(frozen=True)
class Credentials:
    """A user's name and password; or, if `username` is empty, an identity token."""

    username: str
    secret: str

    def basic(self) -> str:
        """Return the header of HTTP's basic authentication."""
        return "Basic " + base64.b64encode(f"{self.username}:{self.secret}".encode()).decode()


def config_file() -> Path:
    """Return docker's configuration file."""
    return Path(os.environ.get("DOCKER_CONFIG") or Path.home() / ".docker") / "config.json"


def credentials_of(registry: str) -> Credentials | None:
    """Return the credentials for a registry; None if there are none. Raises RepositoryError."""
    file = config_file()
    if not file.is_file():
        return None
    try:
        config = json.loads(file.read_text("utf-8"))
        helper = config.get("credHelpers", {}).get(registry) or config.get("credsStore")
        key = DOCKER_HUB_KEY if registry == DOCKER_HUB else registry
        entries = config.get("auths", {})
        entry = entries.get(key) or entries.get(f"https://{registry}")
        found = _from_entry(entry) if entry else None
    except (OSError, AttributeError, TypeError, ValueError) as error:
        raise RepositoryError(f"{file} cannot be read ({first_line(error)}); correct it, or log in again") from error
    return found or (_from_helper(helper, key) if helper else None)


def _from_entry(entry: dict[str, Any]) -> Credentials | None:
    """Return the credentials of an entry; None if a helper has them. Raises ValueError."""
    if entry.get("identitytoken"):
        return Credentials("", entry["identitytoken"])
    if not entry.get("auth"):
        return None
    username, separator, secret = base64.b64decode(entry["auth"]).decode().partition(":")
    if not separator:
        raise ValueError("an auth without a colon")
    return Credentials(username, secret)


def _from_helper(helper: str, registry: str) -> Credentials | None:
    """Return what docker's helper program knows of a registry."""
    program = f"docker-credential-{helper}"
    try:
        answer = subprocess.run(
            [program, "get"], input=registry, capture_output=True, text=True, timeout=HELPER_TIMEOUT_S
        )
        if answer.returncode:  # by its protocol, also where it has none
            return None
        found = json.loads(answer.stdout)
        return Credentials("" if found["Username"] == TOKEN_USER else found["Username"], found["Secret"])
    except (OSError, KeyError, TypeError, ValueError, subprocess.TimeoutExpired) as error:
        raise RepositoryError(
            f"{program}, which {config_file()} names, gave no credentials for {registry} ({first_line(error)}); "
            "install it, or log in again"
        ) from error
