"""Devices, and how TensorRT builds engines for them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from builder.common.cards import CARDS
from builder.options.options import Options


def _known_card(name: str) -> str:
    if name not in CARDS:
        raise ValueError(f"the cards known are {', '.join(CARDS)}")
    return name


CardName = Annotated[str, AfterValidator(_known_card)]


class Gpu(Options):
    """Where and how instances run on GPUs. Set in models.yaml under `gpu:`."""

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
    """How TensorRT builds its engines. Set in models.yaml under `tensorrt:`."""

    profiles: tuple[Profile, ...] = ()
    """Optimisation profiles; together they must cover every call. Default: derived from --max-batch-size and
    --max-length."""
    workspace_mb: int | None = Field(None, ge=1)
    """Most scratch memory of one tactic. Default: all of the device's memory."""
    optimization_level: int = Field(3, ge=0, le=5)
    """TensorRT's builder optimisation level: higher searches longer for fast tactics."""
    engine_folder: str = "/engines"
    """Folder inside the container in which ONNX Runtime's TensorRT provider caches engines and timings."""
