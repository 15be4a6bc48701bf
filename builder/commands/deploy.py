"""`build-repo deploy`: a repository as the manifests of an orchestrator."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from builder.clusters.deploy.targets import find_target, names
from builder.commands import DEFAULT_REPOSITORY, VERIFY_KEY_HELP, count, positive, screen, screen_table
from builder.common.addresses import store_address
from builder.common.errors import RepositoryError, SpecError

if TYPE_CHECKING:
    from builder.clusters.deploy.deployment import Deployment, LoadingOnDemand


def parser() -> argparse.ArgumentParser:
    arguments = argparse.ArgumentParser(
        prog="build-repo deploy",
        description="Write what an orchestrator needs to serve a repository: replicas that each run Triton and the "
        "gateway, with the memory, cores and shared memory that the models take. Nothing is sent to a cluster.",
    )
    add = arguments.add_argument
    add("--to", required=True, choices=names(), help="the orchestrator")
    add(
        "--repository",
        default=str(DEFAULT_REPOSITORY),
        metavar="DIR",
        help=f"a folder (default {DEFAULT_REPOSITORY}), or what each replica pulls from: an object store, or "
        "oci://REGISTRY/REPOSITORY",
    )
    add(
        "--output",
        default=Path("deploy"),
        type=Path,
        metavar="DIR",
        help="where the files are written (default deploy)",
    )
    add("--name", default="models", help="name of the deployment (default models)")
    add(
        "--model",
        action="append",
        default=[],
        metavar="NAME",
        help="deploy this model alone, NAME@N this version of it; may be repeated (default: all models, of a store the "
        "newest versions, of a folder those that are served)",
    )
    add(
        "--plan",
        type=Path,
        metavar="FILE",
        help="a models.yaml whose `load:` and `machine:` size replicas (default: as built)",
    )
    add(
        "--pod",
        type=Path,
        metavar="FILE",
        help="a models.yaml whose `pod:` says what the cluster asks of each pod: image pull secrets, tolerations, node "
        "selector, priority class, service account, runtime class, claims for caches and models, and images (default: "
        "the file of --plan)",
    )
    add("--cores", type=count, metavar="N", help="cores of a replica (default: as planned, or as built with --threads)")
    add(
        "--memory-gb",
        type=positive,
        metavar="GB",
        help="memory of a replica in 10^9 bytes, without /dev/shm (default: as built, or planned); with "
        "--load-on-demand, what each Triton and its loaded models may take, without a default",
    )
    add(
        "--load-on-demand",
        action="store_true",
        help="run the Tritons in pods of their own, behind two gateways that load each model when it is asked for, on "
        "the Triton that has memory for it",
    )
    add(
        "--pin",
        action="append",
        default=[],
        metavar="NAME",
        help="with --load-on-demand: a model that is loaded at once and stays, on every Triton; may be repeated",
    )
    add(
        "--replicas",
        type=count,
        default=2,
        metavar="N",
        help="replicas at first, and the fewest that there are; with --load-on-demand, of Triton (default 2)",
    )
    add("--max-replicas", type=count, metavar="N", help="the most replicas: more are started while requests wait")
    add(
        "--prometheus",
        metavar="URL",
        help="address of the Prometheus that knows how long they wait; needed with --max-replicas",
    )
    add(
        "--queue-ms",
        type=count,
        default=50,
        metavar="MS",
        help="the wait from which more replicas are started (default 50)",
    )
    add(
        "--registry",
        metavar="HOST",
        help="where the cluster gets its images from, HOST or HOST/PATH; needed but for ray",
    )
    add("--namespace", default="default", help="namespace of the cluster (default default)")
    add("--keys-secret", metavar="SECRET", help="the cluster's secret whose entry `keys` says who may ask the gateway")
    add(
        "--store-secret",
        metavar="SECRET",
        help="the cluster's secret whose entries the pull gets as variables: credentials of the store; for a registry, "
        "the secret of its login, which kubectl create secret docker-registry makes",
    )
    add(
        "--hub-secret",
        metavar="SECRET",
        help="the cluster's secret whose entries the server gets as variables where vLLM downloads a checkpoint: "
        "HF_TOKEN",
    )
    add("--verify-key", type=Path, metavar="FILE", help=f"have replicas pull only what was signed: {VERIFY_KEY_HELP}")
    add(
        "--endpoint",
        metavar="URL",
        help="address of a store that speaks S3, where it is not Amazon's: http://HOST:PORT",
    )
    add(
        "--probe",
        action="append",
        default=[],
        metavar="NAME",
        help="probe this model by itself, with a request; may be repeated",
    )
    add("--monitor", action="store_true", help="have Prometheus' operator collect the metrics")
    add("--inference-pool", action="store_true", help="let an inference gateway choose the replica")
    return arguments


def run(options: argparse.Namespace) -> int:
    with screen.status("reading what the repository holds"):
        deployment = _deployment(options)
    target = find_target(options.to)
    _write(options.output, target.files(deployment))
    screen_table(_table(deployment))
    screen.print(f"[green]✓[/] {options.output} is written; then:")
    for step in target.steps(deployment, options.output):
        screen.print(f"  {step}", soft_wrap=True)
    return 0


def _deployment(options: argparse.Namespace) -> Deployment:
    """Return the deployment that the options describe. Raises SpecError and RepositoryError."""
    from builder.clusters.deploy.contents import pulled_bytes, read_deployed_models
    from builder.clusters.deploy.deployment import Deployment, Scaling, SecretNames, check_deployment
    from builder.clusters.deploy.sizes import as_built, as_loaded_on_demand, as_planned
    from builder.options import PodOptions, load_pod_options
    from builder.repository.signing_keys import trusted_text

    if (options.max_replicas is None) != (options.prometheus is None):
        raise SpecError("--max-replicas and --prometheus go together: Prometheus knows how long requests wait")
    stored = store_address(options.repository) is not None
    models = read_deployed_models(options.repository, options.model)
    memory, loading = None if options.memory_gb is None else round(options.memory_gb * 1e9), _on_demand(options)
    if loading is not None:
        size = as_loaded_on_demand(models, loading, options.cores)
    elif options.plan is None:
        size = as_built(models, options.cores, memory)
    else:
        models, size = as_planned(models, options.plan, options.replicas, options.cores)
        size = replace(size, memory=memory or size.memory)
    most, described = options.max_replicas, options.pod or options.plan
    return check_deployment(
        Deployment(
            name=options.name,
            repository=options.repository,
            stored=stored,
            models=models,
            size=size,
            replicas=options.replicas,
            namespace=options.namespace,
            registry=options.registry,
            endpoint=options.endpoint,
            trusted=None if options.verify_key is None else trusted_text(options.verify_key),
            scaling=None if most is None else Scaling(most, options.prometheus, options.queue_ms),
            secrets=SecretNames(options.keys_secret, options.store_secret, options.hub_secret),
            probed=tuple(options.probe),
            monitored=options.monitor,
            pooled=options.inference_pool,
            pulled=pulled_bytes(options.repository, models) if stored else None,
            pod=PodOptions() if described is None else load_pod_options(described),
            on_demand=loading,
        )
    )


def _on_demand(options: argparse.Namespace) -> LoadingOnDemand | None:
    """Return the options of loading on demand. Raises SpecError for options that do not go together."""
    from builder.clusters.deploy.deployment import LoadingOnDemand

    if not options.load_on_demand:
        if options.pin:
            raise SpecError("--pin says what --load-on-demand loads at once; give that too")
        return None
    if options.plan is not None:
        raise SpecError("--plan sizes replicas that have all models loaded: with --load-on-demand leave it out")
    if options.memory_gb is None:
        raise SpecError("--load-on-demand needs the memory that each Triton and its models may take: --memory-gb N")
    return LoadingOnDemand(round(options.memory_gb * 1e9), tuple(dict.fromkeys(options.pin)))


def _write(folder: Path, files: Mapping[str, str]) -> None:
    """Write `files`. Raises RepositoryError if the folder has others: a target reads all of them."""
    there = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    others = sorted(there - set(files))
    if others:
        raise RepositoryError(
            f"{folder} has {others[0]}, which is not written now; give a folder of its own, or remove it"
        )
    try:
        for name, text in files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, "utf-8")
    except OSError as error:
        raise RepositoryError(
            f"{error.filename} cannot be written ({error.strerror}); choose another folder with --output"
        ) from error


def _table(deployment: Deployment) -> Table:
    """Return a table of a replica's models and resources."""
    table = Table(title=f"{deployment.name}: one of {deployment.replicas} replicas", title_justify="left")
    for column in ("model", "version", "memory, MB", "/dev/shm, MiB", "cores"):
        table.add_column(column, justify="left" if column == "model" else "right")
    for model in deployment.models:
        plan = model.plan
        cores = "all" if plan.cores is None else f"{plan.cores:.3g}"
        table.add_row(model.name, str(model.version), f"{plan.memory / 1e6:.0f}", f"{plan.shm / 2**20:.0f}", cores)
    size = deployment.size
    table.add_row("Triton", "", f"{size.memory / 1e6:.0f}", f"{size.shm >> 20}", str(size.cores), style="bold")
    return table
