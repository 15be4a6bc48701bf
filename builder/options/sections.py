"""Sections of a specification: how devices, engines and calibration work, and the load that a model must bear."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue, model_validator

from builder.common.cards import CARDS
from builder.common.engines import ENGINES

# Engines that run the checkpoint as it is.
WHOLE_CHECKPOINT = tuple(name for name, facts in ENGINES.items() if facts.runs_checkpoint)


class Options(BaseModel):
    """A part of the specification: frozen, without unknown keys; the docstring of a field is its help."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class Calibration(Options):
    """Choose how int8-static measures activations on the samples. Set in models.yaml under `calibration:`."""

    method: Literal["min-max", "entropy", "percentile"] = "min-max"
    """How the range of an activation follows from the values seen: all of them (min-max), the range that loses least
    information (entropy), or all but the outermost (percentile)."""
    per_channel: bool = True
    """One scale for each output channel of a weight, instead of one for the whole matrix."""
    symmetric: bool = False
    """Signed activations with a range around zero, instead of the range from smallest to largest value."""
    smooth: float = Field(0.7, ge=0, le=1)
    """SmoothQuant's alpha: how much of the activations' magnitude is moved into the weights first. 0: none."""


class Load(Options):
    """Requests that the model must answer, which `build-repo plan models.yaml` plans for.

    Set in models.yaml under `load:`.
    """

    requests_per_s: float = Field(gt=0)
    """Requests a second, on average, at random times."""
    tokens: int = Field(64, ge=1)
    """Tokens of a text, or of a prompt, on average."""
    longest: int | None = Field(None, ge=1)
    """Tokens of the longest one. Default: as long as the model takes."""
    texts: int = Field(1, ge=1)
    """Texts of one request. Encoders only."""
    answer_tokens: int = Field(128, ge=1)
    """Tokens of an answer, on average. Models that generate."""
    p99_ms: float | None = Field(None, gt=0)
    """Milliseconds within which 99 of 100 requests of an encoder must be answered."""
    first_token_ms: float | None = Field(None, gt=0)
    """Milliseconds within which an answer should begin, once it has its turn. Models that generate."""
    between_tokens_ms: float | None = Field(None, gt=0)
    """Milliseconds from one token of a running answer to the next, at most. Models that generate."""
    distinct_texts: int | None = Field(None, ge=1)
    """Number of different texts that are asked again and again; Triton's response cache is then sized for them.
    Encoders only.
    """

    def shared_by(self, pods: int) -> Load:
        """Return the share of the requests of each of `pods` equal machines."""
        return self.model_copy(update={"requests_per_s": self.requests_per_s / pods})


def _known_card(name: str) -> str:
    if name not in CARDS:
        raise ValueError(f"the cards known are {', '.join(CARDS)}")
    return name


CardName = Annotated[str, AfterValidator(_known_card)]


class Gpu(Options):
    """Choose where and how instances run on GPUs. Set in models.yaml under `gpu:`."""

    card: CardName | None = None
    """Card that will serve, such as l4 or h100 (--gpu): what it cannot run, or has no memory for, is refused."""
    devices: tuple[Annotated[int, Field(ge=0)], ...] = Field((0,), min_length=1)
    """CUDA device numbers. Each device runs --instances engine instances."""
    memory_limit_mb: int | None = Field(None, ge=1)
    """Most device memory that ONNX Runtime's arena may take. Default: all of it."""
    arena_extend_strategy: Literal["kNextPowerOfTwo", "kSameAsRequested"] = "kSameAsRequested"
    """How ONNX Runtime's arena grows. kSameAsRequested wastes less memory where several models share a device."""
    cudnn_conv_algo_search: Literal["EXHAUSTIVE", "HEURISTIC", "DEFAULT"] = "HEURISTIC"
    """How cuDNN chooses a convolution, in models that have any. EXHAUSTIVE tries all of them at each new shape."""
    cuda_graphs: bool = False
    """Capture CUDA graphs of a plan in shapes of powers of two, to which calls are then padded. TensorRT plans only."""


class Profile(Options):
    """One TensorRT optimisation profile. Each bound is [rows, tokens]."""

    min: tuple[int, int] = (1, 1)
    """Smallest shape."""
    opt: tuple[int, int]
    """Shape that TensorRT tunes for."""
    max: tuple[int, int]
    """Largest shape."""

    @model_validator(mode="after")
    def _ordered(self) -> Profile:
        for what, least, best, most in zip(("rows", "tokens"), self.min, self.opt, self.max, strict=True):
            if not 1 <= least <= best <= most:
                raise ValueError(f"a profile's {what} must be 1 <= min <= opt <= max, found {least}, {best}, {most}")
        return self


class TensorRT(Options):
    """Choose how TensorRT builds its engines. Set in models.yaml under `tensorrt:`."""

    profiles: tuple[Profile, ...] = ()
    """Optimisation profiles; together they must cover every call. Default: derived from --max-batch-size and
    --max-length."""
    workspace_mb: int | None = Field(None, ge=1)
    """Most scratch memory of one tactic. Default: all of the device's memory."""
    optimization_level: int = Field(3, ge=0, le=5)
    """TensorRT's builder optimisation level: higher searches longer for fast tactics."""
    engine_folder: str = "/engines"
    """Folder inside the container in which ONNX Runtime's TensorRT provider caches engines and timings."""


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
