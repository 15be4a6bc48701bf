"""Locate the folders of the installed project, read its version, and say how to install its extras."""

from __future__ import annotations

import json
import shlex
import sys
from importlib import metadata, util
from pathlib import Path
from urllib.parse import unquote, urlsplit

DISTRIBUTION = "triton-model-repository-builder"
PACKAGE = Path(__file__).parent.parent
RUNTIME = PACKAGE / "runtime"  # the code that is emitted


def own_version() -> str:
    """Return the version that is installed."""
    return metadata.version(DISTRIBUTION)


def sources_folder() -> str:
    """Return the name of the folder that the source distribution unpacks to."""
    return f"{DISTRIBUTION.replace('-', '_')}-{own_version()}"


def installing(extra: str) -> str:
    """Return the command that installs an extra here or, in an environment of uvx, runs the project with it."""
    if _is_of_uv_tool():
        return f"uv tool install '{_requirement(extra)}'"
    if _is_of_uvx():
        return f"uvx --from '{_requirement(extra)}' build-repo"
    return installing_here(f"'{DISTRIBUTION}[{extra}]'")


def installing_here(arguments: str) -> str:
    """Return the command that installs into this environment; `arguments` are those of `pip install`."""
    if _is_of_uv_tool() or _is_of_uvx():
        return f"uv pip install --python {shlex.quote(sys.prefix)} {arguments}"
    return f"{'uv pip install' if util.find_spec('pip') is None else 'pip install'} {arguments}"


def _is_of_uv_tool() -> bool:
    """Return True in an environment of `uv tool install`. Source: uv's page "Tools", uv 0.13."""
    return (Path(sys.prefix) / "uv-receipt.toml").is_file()


def _is_of_uvx() -> bool:
    """Return True in an environment of uvx, which is in uv's cache. Source: uv's page "Caching", uv 0.13."""
    return Path(sys.prefix).parent.name.startswith("archive-v")


def _requirement(extra: str) -> str:
    """Return the project with an extra, from where it was installed: a file, a folder, an address or a package index.

    Source: PEP 610 and PEP 508.
    """
    text = metadata.distribution(DISTRIBUTION).read_text("direct_url.json")
    if text is None:
        return f"{DISTRIBUTION}[{extra}]"
    origin = json.loads(text)
    url, checkout = origin["url"], origin.get("vcs_info")
    if checkout is None and url.startswith("file:"):
        return f"{unquote(urlsplit(url).path)}[{extra}]"
    source = url if checkout is None else f"{checkout['vcs']}+{url}@{checkout['commit_id']}"
    return f"{DISTRIBUTION}[{extra}] @ {source}"
