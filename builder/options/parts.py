"""Parts of a request that single stages of a build take."""

from __future__ import annotations

from dataclasses import dataclass

from builder.options.serving import Serving


@dataclass(frozen=True)
class Source:
    """`model`: a Hub id or a local folder; the rest is None if the checkpoint itself decides.

    `late_chunking`: an embedder's graph returns the vectors of tokens, for the front to pool.
    `adapter_labels`: maximum number of labels of an adapter's head; a classifier's checkpoint may then lack a head.
    """

    model: str
    revision: str | None = None
    task: str | None = None
    max_length: int | None = None
    pooling: str | None = None
    late_chunking: bool = False
    adapter_labels: int | None = None


@dataclass(frozen=True)
class Capacity:
    """Cores and memory that a model may use where it is served, and how they are divided there.

    `memory`: bytes; `threads`: of each of `instances`; `prefill_tokens`: of prompts, between two decode steps.
    """

    name: str
    cores: int
    memory: float
    instances: int
    threads: int
    slots: int
    prefill_tokens: int
    max_batch_size: int
    serving: Serving


@dataclass(frozen=True)
class Budget:
    """Measure of labelled data, and how much of it a variant may lose: a number, or a share of PyTorch's."""

    measure: str
    loss: float
    is_share: bool


@dataclass(frozen=True)
class WeightOptions:
    """Options of int8-weights and int4-weights: inputs that share a scale, and whether a block has no zero point."""

    block_size: int
    symmetric: bool


@dataclass(frozen=True)
class WholeCheckpoint:
    """Options of every engine that runs a checkpoint as it is.

    `slots`: None if the engine chooses the number itself.
    """

    triton: str
    precision: str
    slots: int | None
    max_length: int | None
