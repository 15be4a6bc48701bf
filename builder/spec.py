"""What the user asks for: one BuildSpec a model, from the command line or from a models.yaml.

Knows options and their limits; knows nothing about checkpoints, graphs or Triton files.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError, field_validator, model_validator

from builder.engines.gpu import CARDS
from builder.engines.releases import NEWEST, RELEASES
from builder.errors import SpecError
from builder.machine import available_cores, available_memory

HEADROOM = 0.9  # of the memory that is free: what a model may be planned to take
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")

WHOLE_CHECKPOINT = ("vllm", "tensorrt-llm")  # engines that run the checkpoint as it is


class _Options(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class QueuePolicy(_Options):
    """The request queue of the front model: Triton's default_queue_policy. What it refuses gets UNAVAILABLE (HTTP
    503)."""

    timeout_us: int = Field(30_000_000, ge=0)
    """Microseconds that a request may wait in the queue; 0: no limit."""
    max_size: int = Field(512, ge=0)
    """Requests that may wait at once; further ones are refused at once. 0: no limit."""
    allow_timeout_override: bool = False
    """Whether a request may set a shorter timeout of its own."""
    timeout_action: Literal["REJECT", "DELAY"] = "REJECT"
    """What happens to a request after timeout_us: refuse it, or let it wait behind all others."""


class RateLimiterResource(_Options):
    """A resource of Triton's rate limiter that each engine instance needs in order to run."""

    name: str
    """Name of the resource."""
    count: int = Field(1, ge=1)
    """How much of the resource one execution takes."""
    is_global: bool = False
    """Whether all devices share the resource, instead of each having its own."""


class Limits(_Options):
    """The largest request that a model takes; a larger one is refused before it is tokenised (INVALID_ARGUMENT, HTTP
    400), because it would keep all others waiting."""

    request_bytes: int = Field(1 << 20, ge=1)
    """Bytes of all texts of one request."""
    list_values: int = Field(1000, ge=1)
    """Values of one list of a request: documents, candidate labels, stop words, token biases."""
    request_tokens: int = Field(1 << 17, ge=1)
    """Tokens of all rows that one request makes, windows of a long text included. Encoders only."""


class Serving(_Options):
    """How Triton queues, batches and runs the model. Set in models.yaml under `serving:`."""

    preferred_batch_sizes: tuple[int, ...] = ()
    """Batch sizes that the dynamic batcher of the front model aims at."""
    queue: QueuePolicy = QueuePolicy()
    """Limits of the request queue."""
    limits: Limits = Limits()
    """Limits of one request."""
    priority_levels: int = Field(0, ge=0)
    """Number of priorities that a request may have, 1 being the most urgent; 0: no priorities."""
    default_priority: int = Field(0, ge=0)
    """The priority of a request that names none."""
    front_instances: int | None = Field(None, ge=1)
    """Instances of the front model. Default: as many as engine instances."""
    warm_up: bool = True
    """Run one request through the model before it is reported ready."""
    response_cache: bool = False
    """Answer repeated requests from Triton's response cache."""
    versions: tuple[int, ...] = ()
    """Versions to serve. Default: the latest only."""
    rate_limiter: tuple[RateLimiterResource, ...] = ()
    """Resources that each engine instance needs to run."""
    rate_limiter_priority: int = Field(0, ge=0)
    """Priority of the engine's instances in the rate limiter."""
    optimization_level: Literal[-1, 0, 1, 2] = 0
    """Triton's `optimization { graph { level } }` of the engine."""
    spinning: bool = True
    """Whether the engine's threads spin (busy-wait) between calls: lower latency, more CPU time."""
    token_budget: int = Field(2048, ge=1)
    """Most tokens in one engine call, padding included. Larger batches are cut."""
    call_cost: int = Field(16, ge=0)
    """Fixed cost of one engine call, expressed in tokens; the cutter weighs padding against it."""
    prefill_tokens: int = Field(256, ge=1)
    """Most prompt tokens processed between two decode steps. More: a new request starts sooner.
    Less: running streams are delayed less."""
    prefix_cache: bool = True
    """Whether prompts with the same beginning reuse the keys and values of that beginning."""
    metadata: Mapping[str, str] = {}
    """Free key-value pairs, written into config.pbtxt as parameters."""


class Machine(_Options):
    """The machine that serves, where it is not the one that builds. Set in models.yaml under `machine:`."""

    cores: int | None = Field(None, ge=1)
    """Cores that the model may use; those of the build machine when left out."""
    memory_gb: float | None = Field(None, gt=0)
    """Memory that the model may use, in 10^9 bytes; what the build machine has free when left out."""


class Calibration(_Options):
    """How int8-static measures activations on the samples. Set in models.yaml under `calibration:`."""

    method: Literal["min-max", "entropy", "percentile"] = "min-max"
    """How the range of an activation follows from the values seen: all of them (min-max), the range that loses least
    information (entropy), or all but the outermost (percentile)."""
    per_channel: bool = True
    """One scale for each output channel of a weight, instead of one for the whole matrix."""
    symmetric: bool = False
    """Signed activations with a range around zero, instead of the range from smallest to largest value."""
    smooth: float = Field(0.7, ge=0, le=1)
    """SmoothQuant's alpha: how much of the activations' magnitude is moved into the weights first. 0: none."""


class Gpu(_Options):
    """Where and how instances run on GPUs. Set in models.yaml under `gpu:`."""

    card: str | None = None
    """The card that will serve, such as l4 or h100 (--gpu): what it cannot run, or has no memory for, is refused."""
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

    @field_validator("card")
    @classmethod
    def _known_card(cls, card: str | None) -> str | None:
        if card is not None and card not in CARDS:
            raise ValueError(f"the cards known are {', '.join(CARDS)}")
        return card


class Profile(_Options):
    """One TensorRT optimisation profile. Each bound is [rows, tokens]."""

    min: tuple[int, int] = (1, 1)
    """Smallest shape."""
    opt: tuple[int, int]
    """The shape that TensorRT tunes for."""
    max: tuple[int, int]
    """Largest shape."""

    @model_validator(mode="after")
    def _ordered(self) -> Profile:
        for what, least, best, most in zip(("rows", "tokens"), self.min, self.opt, self.max, strict=True):
            if not 1 <= least <= best <= most:
                raise ValueError(f"a profile's {what} must be 1 <= min <= opt <= max, found {least}, {best}, {most}")
        return self


class TensorRT(_Options):
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


class VLLM(_Options):
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


class TensorRTLLM(_Options):
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


class BuildSpec(_Options):
    """One model to build. A field with a `flag` is also an option of the command line."""

    model: str
    """Hub id, or a local folder of transformers or sentence-transformers."""
    task: str | None = Field(None, json_schema_extra={"flag": True})
    """Task to serve, such as text-classification. Default: inferred from the checkpoint."""
    name: str | None = Field(None, json_schema_extra={"flag": True})
    """Name of the model in Triton. Default: the last part of MODEL."""
    output: Path = Field(Path("model_repository"), json_schema_extra={"flag": True})
    """Model repository to publish into."""
    revision: str | None = Field(None, json_schema_extra={"flag": True})
    """Branch, tag or commit on the Hugging Face Hub. Default: main."""
    precision: Literal["fp32", "fp16", "bf16", "int8", "int8-static", "int8-weights", "int4-weights", "fp8", "auto"] = (
        Field("fp32", json_schema_extra={"flag": True})
    )
    """Numeric precision. int8: weights and activations in 8 bits, with activation ranges computed at run time.
    int8-static, fp8: activation ranges measured on the samples. int8-weights, int4-weights: only the weights, in
    blocks. auto: measure several and serve the fastest that meets --quality."""
    engine: Literal["onnxruntime", "openvino", "tensorrt", "vllm", "tensorrt-llm", "auto"] | None = Field(
        None, json_schema_extra={"flag": True}
    )
    """Engine that runs the graph. auto: the faster of ONNX Runtime and OpenVINO, measured on this machine. vllm:
    nothing is exported; Triton's vLLM backend runs the checkpoint. Default: the first engine that supports the
    precision; with --precision auto, all are measured."""
    level: Literal["O1", "O2", "O3", "O4"] = Field("O2", json_schema_extra={"flag": True})
    """Graph optimisation level, numbered as in Optimum. O1: basic; O2: fusions; O3: O2 with an approximate GELU;
    O4: O3 in fp16."""
    graph: Path | None = Field(None, json_schema_extra={"flag": True})
    """An ONNX file to serve as it is instead of exporting the checkpoint, for example a QDQ graph from
    quantisation-aware training. Encoders only."""
    prune: float | None = Field(None, gt=0, lt=1, json_schema_extra={"flag": True})
    """Share of the attention heads and feed-forward neurons to remove, those that matter least on the samples.
    Encoders only."""
    quality: float | None = Field(None, ge=0, le=1, json_schema_extra={"flag": True})
    """Lowest acceptable mean agreement with PyTorch on the samples; nothing is published below it. Default: the
    task's own threshold."""
    perplexity: float = Field(1.05, ge=1, json_schema_extra={"flag": True})
    """Highest acceptable perplexity on the samples, as a ratio to PyTorch's. Generating models only."""
    block_size: int = Field(32, json_schema_extra={"flag": True})
    """Weights that share one scale in int8-weights and int4-weights: 16, 32, 64, 128 or 256."""
    asymmetric: bool = Field(False, json_schema_extra={"flag": True})
    """Store a zero point with each block of int8-weights and int4-weights."""
    slots: int = Field(16, ge=1, le=512, json_schema_extra={"flag": True})
    """Sequences that are decoded at once; memory is reserved for --max-length tokens of each. Generating models
    only."""
    beams: int | None = Field(None, ge=1, le=64, json_schema_extra={"flag": True})
    """Most beams of one request. Default: the checkpoint's own number, or --slots for a decoder."""
    max_answer: int | None = Field(None, ge=2, json_schema_extra={"flag": True})
    """Most tokens in an answer of an encoder-decoder model. Default: the checkpoint's own limit, or 256."""
    cache: Literal["fp32", "int8"] = Field("fp32", json_schema_extra={"flag": True})
    """Precision of the key-value cache of a generating model. int8 needs ONNX Runtime 1.31 or later in Triton's
    Python."""
    executor: Literal["in-process", "bls"] = Field("in-process", json_schema_extra={"flag": True})
    """Where decode steps run. in-process: inside the Python model NAME, which updates the cache in place. bls: in a
    separate Triton model NAME_model, called through Triton's business logic scripting (BLS)."""
    samples: Path | None = Field(None, json_schema_extra={"flag": True})
    """File with one JSON object a line, each a request of the task, to verify and calibrate on; labels may be
    added."""
    target: Literal["cpu", "cuda", "tensorrt"] = Field("cpu", json_schema_extra={"flag": True})
    """What the repository runs on. tensorrt: a plan that is compiled later on the GPU machine; with --engine
    onnxruntime, ONNX Runtime's TensorRT provider compiles while the model loads."""
    triton: str = Field(NEWEST, json_schema_extra={"flag": True})
    """Triton release that the repository must load and answer correctly on. Default: the newest known one."""
    max_batch_size: int = Field(64, ge=1, json_schema_extra={"flag": True})
    """Most requests that the front model takes in one batch."""
    max_queue_delay_us: int = Field(0, ge=0, json_schema_extra={"flag": True})
    """Microseconds that a request may wait for others to share a batch. 0: requests batch only while the model is
    busy."""
    instances: int = Field(1, ge=1, json_schema_extra={"flag": True})
    """Engine instances that run in parallel, each with its share of the cores."""
    threads: int | None = Field(None, ge=1, json_schema_extra={"flag": True})
    """Threads of each engine instance. Default: cores / instances."""
    max_length: int | None = Field(None, ge=3, json_schema_extra={"flag": True})
    """Most tokens of one text, or of prompt and answer together for text generation. Default: the checkpoint's own
    limit."""
    truncate: bool = Field(False, json_schema_extra={"flag": True})
    """Cut texts that are too long and set `truncated` in the answer, instead of refusing them."""
    pooling: Literal["cls", "mean", "max", "lasttoken"] | None = Field(None, json_schema_extra={"flag": True})
    """How token vectors become one embedding, for checkpoints that do not say."""
    serving: Serving = Serving()
    """Queueing, batching and scheduling."""
    machine: Machine = Machine()
    """The machine that serves, where it is another one."""
    calibration: Calibration = Calibration()
    """How activation ranges are measured."""
    gpu: Gpu = Gpu()
    """Devices and their memory."""
    tensorrt: TensorRT = TensorRT()
    """Profiles and limits of TensorRT."""
    vllm: VLLM = VLLM()
    """Arguments for vLLM."""
    tensorrt_llm: TensorRTLLM = TensorRTLLM()
    """Arguments for TensorRT-LLM."""

    @model_validator(mode="before")
    @classmethod
    def _engines_have_targets(cls, options: Any) -> Any:
        """An engine that runs nowhere else is a target too."""
        only = {"tensorrt": "tensorrt", **dict.fromkeys(WHOLE_CHECKPOINT, "cuda")}
        if isinstance(options, dict) and options.get("engine") in only and "target" not in options:
            return {**options, "target": only[options["engine"]]}
        return options

    @field_validator("gpu", mode="before")
    @classmethod
    def _card_alone(cls, gpu: Any) -> Any:
        return {"card": gpu} if isinstance(gpu, str) else gpu

    @field_validator("triton")
    @classmethod
    def _known_release(cls, release: str) -> str:
        if release not in RELEASES:
            raise ValueError(f"Triton {release} is not known; known are {', '.join(RELEASES)}")
        return release

    @field_validator("block_size")
    @classmethod
    def _power_of_two(cls, size: int) -> int:
        if size not in (16, 32, 64, 128, 256):
            raise ValueError("a block holds 16, 32, 64, 128 or 256 inputs")
        return size

    @model_validator(mode="after")
    def _consistent(self) -> BuildSpec:
        if not NAME.fullmatch(self.entry_name):
            raise ValueError(
                f"the name {self.entry_name!r} is not a model name: use letters, digits, '.', '_' and '-', "
                "without a path (--name)"
            )
        too_big = [size for size in self.serving.preferred_batch_sizes if size > self.max_batch_size]
        if too_big:
            raise ValueError(f"preferred batch size {too_big[0]} exceeds max_batch_size {self.max_batch_size}")
        if self.serving.default_priority > self.serving.priority_levels:
            raise ValueError("default_priority exceeds priority_levels")
        if self.serving.priority_levels and not self.serving.default_priority:
            raise ValueError("priority_levels needs a default_priority of at least 1")
        if self.level == "O4" and self.precision not in ("fp32", "fp16"):
            raise ValueError(f"level O4 is O3 in fp16, which --precision {self.precision} is not; use --level O3")
        if self.graph is not None and (self.precision != "fp32" or self.prune is not None or self.level != "O2"):
            raise ValueError("--graph is served as it is: without --precision, --prune and --level")
        if self.cache != "fp32" and self.executor == "bls":
            raise ValueError("--cache int8 needs the in-process executor: no Triton release reads it yet")
        if self.beams is not None and self.beams > self.slots:
            raise ValueError(f"a search of {self.beams} beams needs as many slots; --slots is {self.slots}")
        allowed = {"cpu": ("onnxruntime", "openvino", "auto"), "cuda": ("onnxruntime", *WHOLE_CHECKPOINT)}
        engines = allowed.get(self.target, ("tensorrt", "onnxruntime"))
        if self.engine is not None and self.engine not in engines:
            raise ValueError(f"--engine {self.engine} is not of --target {self.target}, which has {', '.join(engines)}")
        meant = {
            "gpu": (self.gpu != Gpu() and self.target == "cpu", "--target cuda or tensorrt"),
            "gpu.cuda_graphs": (self.gpu.cuda_graphs and not self.makes_plan, "plans: --target tensorrt"),
            "tensorrt": (self.tensorrt != TensorRT() and self.target != "tensorrt", "--target tensorrt"),
            "vllm": (self.vllm != VLLM() and self.engine != "vllm", "--engine vllm"),
            "tensorrt_llm": (
                self.tensorrt_llm != TensorRTLLM() and self.engine != "tensorrt-llm",
                "--engine tensorrt-llm",
            ),
        }
        for name, (useless, where) in meant.items():
            if useless:
                raise ValueError(f"`{name}:` is for {where}")
        cores = self.serving_cores
        if self.target == "cpu" and self.threads is not None and self.threads * self.instances > cores:
            raise ValueError(
                f"{self.instances} instances of {self.threads} threads exceed the {cores} cores of the machine that "
                "serves: use fewer of either, or state its cores in models.yaml (machine: {cores: ...})"
            )
        return self

    @property
    def entry_name(self) -> str:
        """The name of the front model."""
        return self.name if self.name is not None else Path(self.model.rstrip("/")).name

    @property
    def runs_checkpoint(self) -> bool:
        """Whether the engine runs the checkpoint as it is, so that nothing is exported."""
        return self.engine in WHOLE_CHECKPOINT

    @property
    def makes_plan(self) -> bool:
        """Whether what is built is a TensorRT plan."""
        return self.target == "tensorrt" and self.engine in (None, "tensorrt")

    @property
    def fits(self) -> bool:
        """Whether something is fitted to the samples, so that it must be judged on others."""
        return self.precision in ("int8-static", "fp8", "auto") or self.prune is not None

    @property
    def serving_cores(self) -> int:
        """Cores of the machine that serves."""
        return self.machine.cores or available_cores()

    @property
    def threads_per_instance(self) -> int:
        """Threads of each engine instance on the machine that serves."""
        return self.threads or max(1, self.serving_cores // self.instances)

    @property
    def loop_threads(self) -> int:
        """Threads of a decode loop: 0, all cores that it finds, where neither threads nor a machine is stated."""
        return self.threads_per_instance if self.threads or self.machine.cores else 0

    @property
    def usable_memory(self) -> float:
        """Bytes that a model may take on the machine that serves."""
        stated = self.machine.memory_gb
        return HEADROOM * available_memory() if stated is None else stated * 1e9

    @property
    def build_threads(self) -> int:
        """Threads to verify and measure with on this machine."""
        return min(self.threads_per_instance, available_cores())


def make_spec(**options: Any) -> BuildSpec:
    """The BuildSpec with these options, named as keys of a models.yaml.

    Raises SpecError, which says what is wrong with which option.
    """
    try:
        return BuildSpec(**options)
    except ValidationError as error:
        raise SpecError(_explain(error, options.get("model"))) from None


def load_specs(path: Path) -> list[BuildSpec]:
    """Read a models.yaml: a mapping with a list `models`, and perhaps `defaults` for all of them.

    Raises SpecError where the file cannot be read, or a key or value of it means nothing.
    """
    try:
        document = yaml.safe_load(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise SpecError(f"{path} cannot be read as YAML: {error}") from error
    if not isinstance(document, dict) or not isinstance(document.get("models"), list) or not document["models"]:
        raise SpecError(f"{path}: expected a mapping with a list `models`, one mapping a model")
    unknown = set(document) - {"models", "defaults"}
    if unknown:
        raise SpecError(f"{path}: unknown key {min(unknown)!r}{_nearest(min(unknown), ['models', 'defaults'])}")
    specs = []
    for entry in document["models"]:
        if not isinstance(entry, dict) or "model" not in entry:
            raise SpecError(f"{path}: each of `models` needs a key `model`; found {entry!r}")
        specs.append(make_spec(**{**(document.get("defaults") or {}), **entry}))
    names = [spec.entry_name for spec in specs]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise SpecError(f"{path}: the name {min(twice)!r} is used twice; give each model its own `name`")
    return specs


def _explain(error: ValidationError, model: str | None) -> str:
    lines = []
    for problem in error.errors():
        path = ".".join(str(part) for part in problem["loc"])
        if problem["type"] == "extra_forbidden":
            owner: type[BaseModel] = BuildSpec
            for part in problem["loc"][:-1]:
                annotation = owner.model_fields[str(part)].annotation if str(part) in owner.model_fields else None
                owner = annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else owner
            lines.append(f"unknown key {path!r}{_nearest(str(problem['loc'][-1]), list(owner.model_fields))}")
        else:
            message = problem["msg"].removeprefix("Value error, ")
            lines.append(f"{path}: {message}, found {problem['input']!r}" if path else message)
    return (f"{model}: " if model else "") + "; ".join(lines)


def _nearest(key: str, known: list[str]) -> str:
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else f"; known are {', '.join(known)}"
