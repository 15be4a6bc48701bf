"""Ask the Hub for the commit of a revision, once a process and in bounded time."""

from __future__ import annotations

from functools import cache
from typing import Any

import httpx2
from huggingface_hub import HfApi, ResolvedRevision, constants, get_cached_repo_tree, get_session
from huggingface_hub.errors import (
    CachedRepoTreeNotFoundError,
    HfHubHTTPError,
    OfflineModeIsEnabled,
    RevisionNotFoundError,
)


class UnansweredError(Exception):
    """Raised, from the error of its request, where the Hub does not say which commit a revision is."""


class _Api(HfApi):
    """Client of the Hub that says that the Hub failed, where HfApi goes on with the commit in the cache.

    The caller then downloads nothing, rather than try again for each file.
    """

    def repo_info(self, *args: Any, **options: Any) -> Any:
        try:
            return super().repo_info(*args, **options)
        except RevisionNotFoundError:
            raise
        except (httpx2.TransportError, OfflineModeIsEnabled, HfHubHTTPError) as error:
            raise UnansweredError from error


@cache
def resolve_commit(model: str, revision: str | None) -> ResolvedRevision | UnansweredError:
    """Return the commit of a revision of `model`, or the error if the Hub does not answer with one.

    A commit is asked for if its files are not listed in the cache: the library asks for that list six times.
    """
    api = _Api()
    try:
        commit = api.resolve_revision(model, revision=revision)
        if commit.resolved == revision and not _is_listed(model, commit):
            api.repo_info(model, revision=revision)
        return commit
    except UnansweredError as error:
        return error


def _is_listed(model: str, commit: ResolvedRevision) -> bool:
    """Return True if the cache lists the files of a commit, so that a download does not ask for them."""
    try:
        get_cached_repo_tree(model, revision=commit)
    except CachedRepoTreeNotFoundError:
        return False
    return True


def bound_requests() -> None:
    """Make huggingface_hub give up a request that the Hub does not answer. It bounds only those for files itself."""
    hooks = get_session().event_hooks["request"]  # of a new client after a fork and after a refused connection
    if _bound not in hooks:
        hooks.append(_bound)


def _bound(request: httpx2.Request) -> None:
    """Set the limits that a request leaves open: how long it waits to connect, and for each next byte."""
    limits = request.extensions["timeout"]
    limits.update({name: constants.HF_HUB_ETAG_TIMEOUT for name, limit in limits.items() if limit is None})
