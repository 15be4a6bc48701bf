"""LoRA adapters of a model, beside its versions: NAME/adapters/ADAPTER.npz.

They are not part of a version: a build, a promotion or a rollback leaves them, and the emitted code refuses one that
does not fit the version it runs. A served model finds a change with the next request that names the adapter.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from builder.common.errors import RepositoryError
from builder.repository.config.render import CONFIG, has_input, parse
from builder.repository.transaction import changing
from builder.repository.versions import require_front, served_number
from builder.runtime.adapter_files import (
    ABOUT,
    ADAPTER,
    FOLDER,
    NAME,
    PARAMETERS,
    SUFFIX,
    adapter_arrays,
    adapter_names,
)
from builder.runtime.contract import ContractError, Serving, load


@dataclass(frozen=True)
class AboutAdapter:
    """Origin of an adapter. `base`: the model that it was trained on; `verified`: what its answers were compared with.

    `error`: largest difference of a log-probability, or of an embedding as a share of its largest number; `agreement`:
    share of the most probable tokens that are the same.
    """

    source: str
    revision: str | None
    sha256: str
    base: str | None
    rank: int
    verified: str | None = None
    error: float | None = None
    agreement: float | None = None


def adaptable_version(repository: Path, model: str) -> tuple[Path, Serving]:
    """Return the folder of the served version of `model`, and its settings.

    Raises RepositoryError if there is no such model, or it was built without --adapters.
    """
    require_front(repository, model)
    number = served_number(repository / model)
    folder = repository / model / str(number)
    try:
        serving, config = load(folder), parse((folder / CONFIG).read_text("utf-8"), model)
    except (ContractError, OSError) as error:
        raise RepositoryError(f"{model} cannot be read: {error}") from error
    if not has_input(config, ADAPTER.name):
        raise RepositoryError(f"{model} was built without --adapters: build it again with --adapters N")
    return folder, serving


def write_adapter(
    repository: Path,
    model: str,
    name: str,
    matrices: Mapping[str, np.ndarray],
    about: AboutAdapter,
    parameters: Mapping[str, Any],
) -> None:
    """Put an adapter beside the versions of `model`, in place of one of that name. Raises RepositoryError.

    `parameters`: of the task, where the adapter's own head changes them.
    """
    if not NAME.fullmatch(name):
        raise RepositoryError(f"{name!r} is not a name of an adapter: use up to 100 letters, digits, '.', '_' and '-'")
    stream = io.BytesIO()
    texts = {ABOUT: asdict(about), **({PARAMETERS: parameters} if parameters else {})}
    arrays = {key: np.array(json.dumps(text)) for key, text in texts.items()}
    np.savez(stream, **arrays, **matrices)  # type: ignore[arg-type]
    with changing(repository, model) as change:
        path = _path(repository, model, name)
        path.parent.mkdir(exist_ok=True)
        change.write(stream.getvalue(), path)


def remove_adapter(repository: Path, model: str, name: str) -> None:
    """Remove an adapter of `model`. Raises RepositoryError if it has none of that name."""
    require_front(repository, model)
    with changing(repository, model) as change:
        names = adapter_names(repository / model / FOLDER)
        if name not in names:
            raise RepositoryError(f"{model} has no adapter {name}; it has {', '.join(names) or 'none'}")
        change.move(_path(repository, model, name), change.staging / f"{name}{SUFFIX}")


def read_adapters(repository: Path, model: str) -> dict[str, AboutAdapter]:
    """Return the adapters of `model` by name. Raises RepositoryError for no such model, or a damaged file."""
    require_front(repository, model)
    found = {}
    for name in adapter_names(repository / model / FOLDER):
        path = _path(repository, model, name)
        try:
            with adapter_arrays(path.read_bytes()) as arrays:
                found[name] = AboutAdapter(**json.loads(str(arrays[ABOUT])))
        except (OSError, ValueError, TypeError) as error:
            raise RepositoryError(f"{path} is damaged ({error}); add the adapter again") from error
    return found


def _path(repository: Path, model: str, name: str) -> Path:
    return repository / model / FOLDER / f"{name}{SUFFIX}"
