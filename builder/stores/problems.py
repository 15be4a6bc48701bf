"""What the libraries of object stores say of a problem, as one line that says what to do about it."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterator

from builder.errors import RepositoryError, first_line

LOUD = ("gcsfs", "google", "azure")  # they log what they raise, too, as tracebacks and as advice of twenty lines
SILENT = logging.NullHandler()  # what a program's own handlers show is still shown
NO_ENTRY = (401, 403)  # of HTTP
PLAIN = re.compile(r"(Forbidden|Bad Request): \S+\n(?P<reason>.+)")  # gcsfs/retry.py: the reason is its second line
CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a profile in ~/.aws, or the machine's role",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS=FILE, gcloud's application-default login, or the machine's service account",
    "az": "AZURE_STORAGE_CONNECTION_STRING, or AZURE_STORAGE_ACCOUNT_NAME with AZURE_STORAGE_ACCOUNT_KEY, "
    "AZURE_STORAGE_SAS_TOKEN, what az login leaves, or the machine's role",
}
CREDENTIALS["abfs"] = CREDENTIALS["az"]


def silence() -> None:
    """Have the libraries' logs not printed where a program has no handler for them."""
    for name in LOUD:
        logging.getLogger(name).addHandler(SILENT)


def scheme_of(url: str) -> str:
    """Of an address."""
    return url.split(":", 1)[0]


def credentials_for(url: str) -> str:
    """What to do where a store lets nobody in, or not this one."""
    return f"its credentials are looked for in {CREDENTIALS[scheme_of(url)]}; they must allow to list, read and write"


def reason(error: Exception) -> str:
    """What a library said, in a line."""
    match = PLAIN.match(str(error))
    return (match["reason"] if match else first_line(error))[:300]


def says_absent(error: Exception) -> bool:
    """Whether a store says that what was asked for is not there; where it was to be written, that is the bucket."""
    return isinstance(error, FileNotFoundError) or getattr(error, "status_code", None) == 404


@contextlib.contextmanager
def in_a_line(url: str, what: str) -> Iterator[None]:
    """Raises RepositoryError for whatever the libraries of a store raise, but for FileExistsError.

    `what`: that could not be done.
    """
    try:
        yield
    except (FileExistsError, RepositoryError):
        raise
    except Exception as error:  # credentials, names, connections
        advice = f"; {credentials_for(url)}" if scheme_of(url) in CREDENTIALS and _is_refusal(error) else ""
        raise RepositoryError(f"{url} could not be {what}: {reason(error)}{advice}") from error


def _is_refusal(error: Exception) -> bool:
    """Whether credentials are missing or are not enough, as s3fs, gcsfs and adlfs say it."""
    status = getattr(error, "status_code", getattr(error, "code", None))
    return (
        isinstance(error, PermissionError)
        or status in NO_ENTRY
        or str(error).startswith("Forbidden")
        or type(error).__name__ in ("NoCredentialsError", "ClientAuthenticationError")
    )
