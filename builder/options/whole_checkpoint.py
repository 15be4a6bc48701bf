"""Engines that run the checkpoint as it is, and their arguments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import Field, JsonValue

from builder.common.engines import ENGINES
from builder.options.options import Options

WHOLE_CHECKPOINT = tuple(name for name, facts in ENGINES.items() if facts.runs_checkpoint)


@dataclass(frozen=True)
class WholeCheckpoint:
    """Options of every engine that runs a checkpoint as it is.

    `slots`: None if the engine chooses the number itself.
    """

    triton: str
    precision: str
    slots: int | None
    max_length: int | None


class VLLM(Options):
    """Arguments for vLLM, with --engine vllm. Set in models.yaml under `vllm:`."""

    tensor_parallel_size: int = Field(1, ge=1)
    """Number of GPUs that each layer is split over."""
    pipeline_parallel_size: int = Field(1, ge=1)
    """Number of pipeline stages, each with a part of the layers."""
    gpu_memory_utilization: float = Field(0.9, gt=0, le=1)
    """Share of each GPU's memory for weights and cache."""
    models_folder: str = "/models"
    """Where the container mounts this repository: a local checkpoint is copied into the repository and vLLM loads it
    from there."""
    arguments: Mapping[str, JsonValue] = {}
    """Any other field of vLLM's AsyncEngineArgs, nested ones such as speculative_config included."""


class TensorRTLLM(Options):
    """Arguments for TensorRT-LLM, with --engine tensorrt-llm. Set in models.yaml under `tensorrt_llm:`."""

    tensor_parallel_size: int = Field(1, ge=1)
    """Number of GPUs that each layer is split over."""
    pipeline_parallel_size: int = Field(1, ge=1)
    """Number of pipeline stages, each with a part of the layers."""
    free_gpu_memory_fraction: float = Field(0.9, gt=0, lt=1)
    """Share of the memory that the weights leave free for the cache."""
    models_folder: str = "/models"
    """Where the container mounts this repository: a local checkpoint is copied into the repository and loaded from
    there."""
