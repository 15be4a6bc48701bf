"""Image of Triton: the stock container with the packages that the emitted Python imports.

Nothing is installed when a container starts. The image has the models too if they are not in a store.
"""

from __future__ import annotations

import hashlib
from importlib.resources import files
from pathlib import Path

from builder.clusters.deploy.deployment import Deployment
from builder.repository.config.arguments import LIVENESS_FOLDER, MODELS_FOLDER, USER
from builder.repository.liveness import FILES, REPOSITORY

LIVENESS = "liveness"  # the folder of the liveness model's repository, beside the Containerfile
CPU, GPU = "requirements.txt", "requirements-gpu.txt"


def image_tag(deployment: Deployment) -> str:
    """Return the image's tag: the release, and a hash of all that is put into it.

    A node that has an image of a tag does not fetch it again (imagePullPolicy IfNotPresent), so other content must have
    another tag.
    """
    models = (
        [] if deployment.stored else [f"{model.name}@{model.version} {model.digest}" for model in deployment.models]
    )
    liveness = [(REPOSITORY / file).read_text("utf-8") for file in FILES]
    content = "\n".join([containerfile(deployment), requirements(deployment), *liveness, *models])
    return f"{deployment.release}-{hashlib.sha256(content.encode()).hexdigest()[:8]}"


def image_files(deployment: Deployment) -> dict[str, str]:
    """Return a Containerfile and the files that it copies, for a folder of their own."""
    needed = {} if deployment.runs_checkpoints else {f"image/{_name(deployment)}": requirements(deployment)}
    liveness = {f"image/{LIVENESS}/{file}": (REPOSITORY / file).read_text("utf-8") for file in FILES}
    return {"image/Containerfile": containerfile(deployment), **needed, **liveness}


def requirements(deployment: Deployment) -> str:
    """Return the packages that the emitted Python imports, with their versions."""
    return files("builder.runtime").joinpath(_name(deployment)).read_text("utf-8")


def build_command(deployment: Deployment, image: str, output: Path) -> str:
    """Return the command that builds the image; any builder with BuildKit's options can run it."""
    models = "" if deployment.stored else f"--build-context models={deployment.repository} "
    return f"docker build --tag {image} --file {output}/image/Containerfile {models}{output}/image"


def containerfile(deployment: Deployment) -> str:
    """Return the steps of the project's Dockerfile, for the release and the processor of the models."""
    name, stock = _name(deployment), f"nvcr.io/nvidia/tritonserver:{deployment.release}-{deployment.container}"
    base = f"FROM {deployment.pod.images.base or stock}"
    if deployment.runs_checkpoints:
        lines = ["# NVIDIA's container with the engine, and the model that says that the server answers.", base]
    else:
        lines = [
            "# The stock Triton container with what the emitted Python imports, installed once instead of at each "
            "start.",
            base,
            "ENV PIP_BREAK_SYSTEM_PACKAGES=1 ORT_DISABLE_TELEMETRY=1 DO_NOT_TRACK=1",
            f"COPY {name} /opt/requirements.txt",
            "RUN pip install --no-cache-dir --requirement /opt/requirements.txt \\",
            f"    && install --directory --owner={USER} --group={USER} /engines",
        ]
    lines.append(f"COPY {LIVENESS} {LIVENESS_FOLDER}")
    if not deployment.stored:
        entries = [entry for model in deployment.models for entry in model.entries]
        lines += [f"COPY --chown={USER}:{USER} --from=models {entry} {MODELS_FOLDER}/{entry}/" for entry in entries]
    return "\n".join([*lines, "# triton-server, of the stock image", f"USER {USER}:{USER}", ""])


def _name(deployment: Deployment) -> str:
    return GPU if deployment.on_gpu else CPU
