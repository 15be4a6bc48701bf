"""Options for Triton: how it queues, batches and runs a model, and on which machine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import Field

from builder.common.cards import CARDS
from builder.options.sections import CardName, Options

QUEUE_SIZE = 512
QUEUE_TIMEOUT_US = 30_000_000


class QueuePolicy(Options):
    """Limits of the requests that wait for a model. Those beyond are refused with UNAVAILABLE (HTTP 503)."""

    timeout_us: int | None = Field(None, ge=0)
    """Microseconds that a request may wait; 0: no limit. Default: 30 s."""
    max_size: int | None = Field(None, ge=0)
    """Requests that may wait at once; further ones are refused; 0: no limit. Default: 512."""
    allow_timeout_override: bool = False
    """Let a request set a shorter timeout of its own. For an encoder, Triton's batcher then keeps the limits and stops
    preparing the next batch: a model with one instance pauses for up to half a second.
    """
    timeout_action: Literal["REJECT", "DELAY"] = "REJECT"
    """Action on a request after timeout_us: refuse it, or let it wait behind all others. DELAY is for encoders,
    and has Triton's batcher keep the limits."""

    @property
    def size(self) -> int:
        """Requests that may wait; 0: any number."""
        return QUEUE_SIZE if self.max_size is None else self.max_size

    @property
    def waiting_us(self) -> int:
        """Microseconds that each may wait; 0: for ever."""
        return QUEUE_TIMEOUT_US if self.timeout_us is None else self.timeout_us

    @property
    def waiting_ms(self) -> int:
        """Milliseconds that each may wait, rounded up; 0: for ever."""
        return -(-self.waiting_us // 1000)


class RateLimiterResource(Options):
    """A resource of Triton's rate limiter that each engine instance needs in order to run."""

    name: str
    """Name of the resource."""
    count: int = Field(1, ge=1)
    """How much of the resource one execution takes."""
    is_global: bool = False
    """Let all devices share the resource, instead of each having its own."""


class RequestLimitOptions(Options):
    """Largest request that a model takes.

    A larger one is refused before it is tokenised (INVALID_ARGUMENT, HTTP 400), because it would keep all others
    waiting.
    """

    request_bytes: int = Field(1 << 20, ge=1)
    """Bytes of all texts of one request."""
    list_values: int = Field(1000, ge=1)
    """Values of one list of a request: documents, candidate labels, stop words, token biases."""
    request_tokens: int = Field(1 << 17, ge=1)
    """Tokens of all rows that one request makes, windows of a long text included. Encoders only."""


class Serving(Options):
    """How Triton queues, batches and runs the model. Set in models.yaml under `serving:`."""

    preferred_batch_sizes: tuple[int, ...] = ()
    """Batch sizes that the dynamic batcher of the front model aims at."""
    queue: QueuePolicy = QueuePolicy()
    """Limits of the request queue."""
    limits: RequestLimitOptions = RequestLimitOptions()
    """Limits of one request."""
    priority_levels: int = Field(0, ge=0)
    """Number of priorities that a request may have, 1 being the most urgent; 0: no priorities."""
    default_priority: int = Field(0, ge=0)
    """Priority of a request that names none."""
    front_instances: int | None = Field(None, ge=1)
    """Instances of the front model. Default: as many as engine instances."""
    warm_up: bool = True
    """Run one request through the model before it is reported ready."""
    response_cache: bool = False
    """Answer repeated requests from Triton's response cache."""
    rate_limiter: tuple[RateLimiterResource, ...] = ()
    """Resources that each engine instance needs to run."""
    rate_limiter_priority: int = Field(0, ge=0)
    """Priority of the engine's instances in the rate limiter."""
    optimization_level: Literal[-1, 0, 1, 2] = 0
    """Triton's `optimization { graph { level } }` of an engine of ONNX Runtime. 0: all optimisations of the graph; 1:
    basic and extended ones; -1: basic ones; 2: none."""
    spinning: bool = True
    """Let the engine's threads spin (busy-wait) for their next work: lower latency, more CPU time. Between calls only
    those of a model that generates do.
    """
    token_budget: int = Field(2048, ge=1)
    """Most tokens in one engine call, padding included. Larger batches are cut. Where a graph computes what rows begin
    with in common once, each token that it skips counts as a quarter."""
    call_cost: int = Field(16, ge=0)
    """Fixed cost of one engine call, expressed in tokens; the cutter weighs padding against it."""
    prefill_tokens: int | None = Field(None, ge=1)
    """Most prompt tokens processed between two decode steps; over a cache in blocks, decoded tokens count as well, and
    prompts have at least half. More: a new request starts sooner.
    Less: running streams are delayed less. Default: 256, and 1,024 on a GPU."""
    prefix_cache: bool = True
    """Let prompts with the same beginning reuse the keys and values of that beginning."""
    tool_parser: Literal["hermes", "llama3_json", "mistral", "pythonic"] | None = None
    """Notation in which a decoder writes calls of tools, as vLLM names it. Default: the one that its chat template
    renders, where that is one of these."""
    batch_dimension: bool = False
    """Give the tensors of a model that generates a leading dimension of 1, as clients of TensorRT-LLM's models send
    them: [1, 1] instead of [1].
    """
    dynamo: bool = False
    """Add the output `class_scores` to a text-classification model: the scores of all classes in their order, with a
    file of their names, as NVIDIA Dynamo's /v1/classify and Triton's own classification (class_count) read them.
    """
    metadata: Mapping[str, str] = {}
    """Free key-value pairs, written into config.pbtxt as parameters."""

    @property
    def batcher_keeps_limits(self) -> bool:
        """True if Triton's batcher alone can keep the limits of an encoder's queue, and the front cannot.

        It has stopped preparing batches then anyway (core, src/scheduler_utils.cc, PriorityQueue:
        support_prefetching_).
        """
        queue = self.queue
        return bool(self.priority_levels or queue.allow_timeout_override or queue.timeout_action == "DELAY")


class Card(Options):
    """A GPU of the machine that serves."""

    name: CardName
    """One of the cards that `--gpu` knows, such as l4."""
    memory_gb: float | None = Field(None, gt=0)
    """Memory of the card, in 10^9 bytes. Default: that of the smallest card of the name."""

    @property
    def memory(self) -> float:
        """Memory of the card in bytes."""
        return CARDS[self.name].memory_mb * 2.0**20 if self.memory_gb is None else self.memory_gb * 1e9


class Machine(Options):
    """The machine that serves, where it is not the one that builds. Set in models.yaml under `machine:`."""

    cores: int | None = Field(None, ge=1)
    """Cores that the model may use; those of the build machine when left out."""
    memory_gb: float | None = Field(None, gt=0)
    """Memory that the model may use, in 10^9 bytes; what the build machine has free when left out."""
    shm_mb: int | None = Field(None, ge=1)
    """Size of /dev/shm there, in 2^20 bytes; that of the build machine when left out."""
    gpus: tuple[Card, ...] = ()
    """GPUs of the machine, in the order of their CUDA device numbers, which `gpu: {devices: ...}` names. The verb
    `plan` checks that the models fit them.
    """
