"""Errors of the object stores' libraries, as one line with advice."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterator

from builder.common.errors import RepositoryError, first_line

LOGGERS = ("gcsfs", "google", "azure")  # they also log what they raise, as tracebacks and as advice of twenty lines
SILENT = logging.NullHandler()  # a program's own handlers still show their logs
REFUSED_STATUSES = (401, 403)
GCSFS_MESSAGE = re.compile(r"(Forbidden|Bad Request): \S+\n(?P<reason>.+)")  # gcsfs/retry.py
CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a profile in ~/.aws, or the machine's role",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS=FILE, gcloud's application-default login, or the machine's service account",
    "az": "AZURE_STORAGE_CONNECTION_STRING, or AZURE_STORAGE_ACCOUNT_NAME with AZURE_STORAGE_ACCOUNT_KEY, "
    "AZURE_STORAGE_SAS_TOKEN, what az login leaves, or the machine's role",
}
CREDENTIALS["abfs"] = CREDENTIALS["az"]


def silence() -> None:
    """Silence the libraries' logs, except for handlers that a program sets itself."""
    for name in LOGGERS:
        logging.getLogger(name).addHandler(SILENT)


def scheme_of(url: str) -> str:
    """Return the scheme of an address."""
    return url.split(":", 1)[0]


def credentials_for(url: str) -> str:
    """Return the advice for a store that refuses the credentials, or lacks them."""
    return f"its credentials are looked for in {CREDENTIALS[scheme_of(url)]}; they must allow to list, read and write"


def reason(error: Exception) -> str:
    """Return a library's message in one line."""
    match = GCSFS_MESSAGE.match(str(error))
    return (match["reason"] if match else first_line(error))[:300]


def is_absent(error: Exception) -> bool:
    """Return True if a store reports that an object is absent; for a write, that its bucket is."""
    return isinstance(error, FileNotFoundError) or getattr(error, "status_code", None) == 404


@contextlib.contextmanager
def one_line_errors(url: str, operation: str) -> Iterator[None]:
    """Raise RepositoryError for every error of a store's libraries except FileExistsError.

    `operation`: its past participle, for the message.
    """
    try:
        yield
    except (FileExistsError, RepositoryError):
        raise
    except Exception as error:  # credentials, names, connections
        advice = f"; {credentials_for(url)}" if scheme_of(url) in CREDENTIALS and _is_refusal(error) else ""
        raise RepositoryError(f"{url} could not be {operation}: {reason(error)}{advice}") from error


def _is_refusal(error: Exception) -> bool:
    """Return True if credentials are missing or insufficient, as s3fs, gcsfs and adlfs report it."""
    status = getattr(error, "status_code", getattr(error, "code", None))
    return (
        isinstance(error, PermissionError)
        or status in REFUSED_STATUSES
        or str(error).startswith("Forbidden")
        or type(error).__name__ in ("NoCredentialsError", "ClientAuthenticationError")
    )
