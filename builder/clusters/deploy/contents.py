"""Models of a repository that can be deployed: the served version of each, read from a folder or a store."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from builder.clusters.deploy.deployment import DeployedModel, digest_of_model
from builder.clusters.deploy.hosting import shared_fronts
from builder.common.errors import RepositoryError, SpecError
from builder.common.store_address import split_version
from builder.repository.config.render import CONFIG
from builder.repository.report.record import REPORT, read_report
from builder.repository.sharing.hosting import config_of
from builder.repository.stores.store import Store, is_store, open_store
from builder.repository.versions import entry_names, is_front
from builder.runtime.contract import FILE, GenerationServing, load
from builder.serving.plan.built import plan_built
from builder.serving.plan.needs import served_version

DESCRIBING_FILES = (CONFIG, REPORT, FILE)  # the files that describe a version


def read_deployed_models(repository: str, wanted: Sequence[str] = ()) -> tuple[DeployedModel, ...]:
    """Return the models of a folder or an object store, or only those `wanted`, as NAME or NAME@VERSION.

    Raises SpecError and RepositoryError.
    """
    versions = dict(split_version(text) for text in wanted)
    if not is_store(repository):
        return _of_folder(Path(repository), versions)
    with tempfile.TemporaryDirectory(prefix="outline-") as folder:
        fetch_descriptions(open_store(repository), versions, Path(folder))
        return _of_folder(Path(folder), {}, repository)


def fetch_descriptions(store: Store, versions: dict[str, int | None], folder: Path) -> None:
    """Write to `folder` the files that describe versions of a store: the newest of each model, or the `versions`."""
    for name in versions or store.models():
        manifest = store.manifest(name, versions.get(name))
        for path, blob in manifest.files.items():
            entry, *_, file = PurePosixPath(path).parts
            if file not in DESCRIBING_FILES or path != f"{entry}/{manifest.version}/{file}":
                continue
            target = folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            store.get(blob, target)
            if file != FILE:
                (folder / entry / file).write_bytes(target.read_bytes())


def _of_folder(folder: Path, versions: dict[str, int | None], origin: str = "") -> tuple[DeployedModel, ...]:
    fronts = [path.parent.name for path in sorted(folder.glob(f"*/{REPORT}")) if is_front(path.parent)]
    shared = {model.name: model for model in shared_fronts(folder)}
    fronts = sorted([*fronts, *shared])
    missing = sorted(set(versions) - set(fronts))
    if missing or not fronts:
        there = ", ".join(fronts) or "no model that was built"
        raise RepositoryError(f"{origin or folder} has no {missing[0] if missing else 'model'}; it has {there}")
    models = tuple(shared.get(name) or _model(folder, name) for name in fronts if not versions or name in versions)
    for model in models:
        wanted = versions.get(model.name)
        if wanted not in (None, model.version):
            raise RepositoryError(
                f"{folder} serves version {model.version} of {model.name}, not {wanted}; "
                f"change that first: build-repo rollback {model.name}"
            )
    return models


def _model(folder: Path, name: str) -> DeployedModel:
    report, version = read_report(folder, name), served_version(folder / name)
    if not (version / FILE).is_file():
        raise SpecError(f"{name}: its engine runs in a container of its own, which is not deployed here")
    generates = isinstance(load(version), GenerationServing)
    folders = tuple(entry_names(folder, name, int(version.name)))
    return DeployedModel(
        name=name,
        version=int(version.name),
        entries=folders,
        release=report.triton,
        target=report.target,
        generates=generates,
        request=_request(folder / name, generates),
        plan=plan_built(folder, name),
        digest=digest_of_model([report], [config_of(folder / entry) for entry in folders]),
    )


def _request(entry: Path, generates: bool) -> str:
    """Return a request as JSON, with a short text in each required input."""
    config = config_of(entry)
    texts = {tensor.name: "a" for tensor in config.input if not tensor.optional}
    return json.dumps({**texts, "max_tokens": 1} if generates else texts)
