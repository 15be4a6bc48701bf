"""Models of a repository that can be deployed, read from a folder or a store.

A shared front is one model: one process that answers for encoders which have no front of their own.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from builder.clusters.deploy.deployment import DeployedModel, PulledBytes, digest_of_model
from builder.clusters.deploy.whole_checkpoint import whole_checkpoint
from builder.common.addresses import split_version, store_address
from builder.common.engines import ENGINES
from builder.common.errors import RepositoryError, SpecError
from builder.repository.report.record import REPORT, read_report
from builder.repository.sharing.hosting import MODELS, NAMES_THE_MODEL, config_of, hosted_repositories, read_hosted
from builder.repository.stores.description import describing_blobs, fetch_description
from builder.repository.stores.opening import chosen_version, open_versions
from builder.repository.versions import entry_names, is_front
from builder.runtime.contract import FILE, ContractError, GenerationServing, load, load_shared
from builder.runtime.hosted import HostedModel
from builder.serving.gateway.residency.memory import estimate_memory
from builder.serving.plan.built import plan_built
from builder.serving.plan.lines import ModelPlan, PlanLine, megabytes
from builder.serving.plan.needs import served_version


def read_deployed_models(repository: str, requested: Sequence[str] = ()) -> tuple[DeployedModel, ...]:
    """Return the models of a folder, a store or a registry, or only those `requested`, as NAME or NAME@VERSION.

    Raises SpecError and RepositoryError.
    """
    versions = dict(split_version(text) for text in requested)
    if store_address(repository) is None:
        return _of_folder(Path(repository), versions)
    store = open_versions(repository)
    with tempfile.TemporaryDirectory(prefix="outline-") as folder:
        for name in versions or store.models():
            version = chosen_version(repository, versions.get(name))
            fetch_description(store.manifest(name, version), store, Path(folder))
        return _of_folder(Path(folder), {}, repository)


def pulled_bytes(url: str, models: Sequence[DeployedModel]) -> PulledBytes:
    """Return the bytes of the files that pods pull from the store at `url`. Raises RepositoryError."""
    store = open_versions(url)
    manifests = [store.manifest(model.name, model.version) for model in models]
    files = [manifest.files.values() for manifest in manifests]
    describing = [describing_blobs(manifest).values() for manifest in manifests]
    whole, described = (sum(blob.size for blobs in parts for blob in blobs) for parts in (files, describing))
    return PulledBytes(whole, described)


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
        requested = versions.get(model.name)
        if requested not in (None, model.version):
            raise RepositoryError(
                f"{folder} serves version {model.version} of {model.name}, not {requested}; "
                f"change that first: build-repo rollback {model.name}"
            )
    return models


def _model(folder: Path, name: str) -> DeployedModel:
    report, version = read_report(folder, name), served_version(folder / name)
    if ENGINES[report.engine].runs_checkpoint:
        return whole_checkpoint(folder, report, version)
    if not (version / FILE).is_file():
        raise RepositoryError(f"{version / FILE} is not there: build {name} again")
    generates = isinstance(load(version), GenerationServing)
    folders = tuple(entry_names(folder, name, int(version.name)))
    texts = {tensor.name: "a" for tensor in config_of(folder / name).input if not tensor.optional}
    return DeployedModel(
        name=name,
        version=int(version.name),
        entries=folders,
        release=report.triton,
        target=report.target,
        generates=generates,
        request=json.dumps({**texts, "max_tokens": 1} if generates else texts),
        plan=plan_built(folder, name),
        digest=digest_of_model([report], [config_of(folder / entry) for entry in folders]),
        card=report.gpu,
        estimate=estimate_memory(folder, name, int(version.name)).size,
    )


def shared_fronts(folder: Path) -> Iterator[DeployedModel]:
    """Yield the shared fronts of a repository that host models. Raises RepositoryError and SpecError."""
    for repository in hosted_repositories(folder):
        try:
            hosted = dict(read_hosted(repository))
        except ContractError as error:
            raise RepositoryError(str(error)) from error
        if hosted:
            yield _shared_front(folder, repository.parent.name, hosted)


def _shared_front(folder: Path, name: str, hosted: Mapping[str, HostedModel]) -> DeployedModel:
    reports = [read_report(folder / name / MODELS, model) for model in hosted]
    releases = sorted({report.triton for report in reports})
    if len(releases) > 1:
        raise SpecError(f"{name} hosts models for Triton {' and '.join(releases)}: build them again for one of them")
    version = served_version(folder / name)
    # the memory that the front was given, and the largest shared-memory region of its models
    size, shm = load_shared(version).memory_mb << 20, max(plan_built(folder / name / MODELS, one).shm for one in hosted)
    memory = PlanLine("memory", "--memory-mb of build-repo share", megabytes(size))
    first, model = next(iter(hosted.items()))
    texts = {tensor: "a" for tensor, optional in model.inputs.items() if not optional}
    configs = [config_of(folder / name), *(config_of(folder / name / MODELS / model) for model in sorted(hosted))]
    return DeployedModel(
        name=name,
        version=int(version.name),
        entries=(name,),
        release=releases[0],
        target=reports[0].target,
        generates=False,
        request=json.dumps({NAMES_THE_MODEL: first, **texts}),
        plan=ModelPlan(name, (memory,), {}, size, shm),
        digest=digest_of_model(reports, configs),
    )
