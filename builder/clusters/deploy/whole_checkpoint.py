"""Models of an engine that runs a checkpoint as it is, in a container of NVIDIA's that has the engine.

Nothing of them was run by the build. Memory and /dev/shm are those of vLLM's own example for Kubernetes (docs.vllm.ai,
deployment/k8s): a limit of 20 GB for weights of 14.5 GB, and 2 GiB.
"""

from __future__ import annotations

import json
from pathlib import Path

from builder.clusters.deploy.deployment import DeployedModel, digest_of_model
from builder.common.errors import SpecError
from builder.engines import checkpoint_engine
from builder.repository.config.arguments import MODELS_FOLDER
from builder.repository.report.record import BuildReport
from builder.repository.sharing.hosting import config_of
from builder.serving.plan.lines import ModelPlan, PlanLine, megabytes

BESIDE_WEIGHTS = 6_000_000_000
SHARED_MEMORY = 2 << 30
CHECKPOINT = "checkpoint"  # the folder of a version that has a copy of a local one


def whole_checkpoint(folder: Path, report: BuildReport, version: Path) -> DeployedModel:
    """Return the model whose version is in the folder `version`.

    Its plan has no memory if its weights were not there when it was built. Raises SpecError for a checkpoint in a
    folder that the container does not have.
    """
    weights = report.served.size
    memory = weights + BESIDE_WEIGHTS if weights else 0
    line = PlanLine("memory", f"{megabytes(weights)} of weights + {megabytes(BESIDE_WEIGHTS)}", megabytes(memory))
    engine = checkpoint_engine(report.engine)
    published = engine.published(version)
    here = any(f"/{CHECKPOINT}/" in path for paths in report.files.values() for path in paths)
    if here and not published.model.startswith(f"{MODELS_FOLDER}/{report.name}/"):
        raise SpecError(
            f"{report.name} loads {published.model}, and pods have the repository at {MODELS_FOLDER}: build it again "
            f"without {engine.section}.models_folder"
        )
    return DeployedModel(
        name=report.name,
        version=int(version.name),
        entries=(report.name,),
        release=report.triton,
        target=report.target,
        generates=True,
        request=json.dumps(engine.request),
        plan=ModelPlan(
            report.name, (line,), {}, memory, SHARED_MEMORY, gpu_memory=dict.fromkeys(range(published.cards), 0)
        ),
        digest=digest_of_model([report], [config_of(folder / report.name)]),
        card=report.gpu,
        container=engine.facts.container,
        downloads=not here,
        gpu_share=published.share,
    )
