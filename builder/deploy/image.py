"""The image of Triton: the stock container with what the emitted Python imports, so that nothing is installed when a
container starts, and the models where no store has them.
"""

from __future__ import annotations

import hashlib
from importlib.resources import files
from pathlib import Path

from builder.deploy.deployment import Deployment
from builder.triton.arguments import USER

CPU, GPU = "requirements.txt", "requirements-gpu.txt"


def tag(deployment: Deployment) -> str:
    """The image's tag: the release and, where models are in the image, their versions."""
    if deployment.stored:
        return deployment.release
    names = (name for model in deployment.models for name in (f"{model.name}@{model.version}", *model.hosts))
    versions = " ".join(names)
    return f"{deployment.release}-{hashlib.sha256(versions.encode()).hexdigest()[:8]}"


def image_files(deployment: Deployment) -> dict[str, str]:
    """A Containerfile and what it copies, in a folder of their own."""
    name = GPU if deployment.on_gpu else CPU
    requirements = files("builder.runtime").joinpath(name).read_text("utf-8")
    return {"image/Containerfile": containerfile(deployment), f"image/{name}": requirements}


def build_command(deployment: Deployment, image: str, output: Path) -> str:
    """The command that builds the image; any builder with BuildKit's options can run it."""
    models = "" if deployment.stored else f"--build-context models={deployment.repository} "
    return f"docker build --tag {image} --file {output}/image/Containerfile {models}{output}/image"


def containerfile(deployment: Deployment) -> str:
    """The steps of the Dockerfile of the project, for the release and the processor of the models."""
    name = GPU if deployment.on_gpu else CPU
    lines = [
        "# The stock Triton container with what the emitted Python imports, installed once instead of at each start.",
        f"FROM nvcr.io/nvidia/tritonserver:{deployment.release}-py3",
        "ENV PIP_BREAK_SYSTEM_PACKAGES=1",
        f"COPY {name} /opt/requirements.txt",
        "RUN pip install --no-cache-dir --requirement /opt/requirements.txt \\",
        f"    && install --directory --owner={USER} --group={USER} /engines",
    ]
    if not deployment.stored:
        lines += [f"COPY --from=models {model} /models/{model}/" for model in _entries(deployment)]
    return "\n".join([*lines, "# triton-server, of the stock image", f"USER {USER}:{USER}", ""])


def _entries(deployment: Deployment) -> list[str]:
    return [entry for model in deployment.models for entry in model.entries]
