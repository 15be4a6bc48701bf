"""What the user asks for: one BuildSpec a model, from the command line or from a models.yaml.

Knows options and their limits; knows nothing about checkpoints, graphs or Triton files.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from builder.engines.releases import NEWEST, RELEASES
from builder.errors import SpecError

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


class _Options(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class QueuePolicy(_Options):
    """Triton's default_queue_policy."""

    timeout_us: int = Field(0, ge=0)
    max_size: int = Field(0, ge=0)
    allow_timeout_override: bool = False
    timeout_action: Literal["REJECT", "DELAY"] = "REJECT"


class RateLimiterResource(_Options):
    name: str
    count: int = Field(1, ge=1)
    is_global: bool = False


class Serving(_Options):
    """What config.pbtxt says beyond the common options. Set in models.yaml under `serving:`."""

    preferred_batch_sizes: tuple[int, ...] = ()
    queue: QueuePolicy = QueuePolicy()
    priority_levels: int = Field(0, ge=0)
    default_priority: int = Field(0, ge=0)
    front_instances: int | None = Field(None, ge=1)
    """Instances of the front model; as many as of the engine when left out."""
    warm_up: bool = True
    response_cache: bool = False
    versions: Annotated[tuple[int, ...], Field(description="versions to serve; empty: the latest")] = ()
    rate_limiter: tuple[RateLimiterResource, ...] = ()
    rate_limiter_priority: int = Field(0, ge=0)
    optimization_level: Literal[-1, 0, 1, 2] = 0
    """Triton's optimization { graph { level } }."""
    spinning: bool = True
    """Whether the engine's threads spin while they wait for work."""
    token_budget: int = Field(2048, ge=1)
    """The most padded tokens in one engine call."""
    call_cost: int = Field(16, ge=0)
    """What one engine call costs besides its tokens, in tokens."""
    prefill_tokens: int = Field(256, ge=1)
    """Tokens of prompts between two decode steps: more starts sooner, less disturbs running streams less."""
    prefix_cache: bool = True
    """Whether prompts that begin alike share the keys and values of their beginning."""
    metadata: Mapping[str, str] = {}


class Calibration(_Options):
    """How int8-static measures activations on the samples. Set in models.yaml under `calibration:`."""

    method: Literal["min-max", "entropy", "percentile"] = "min-max"
    """What of the values seen is the range: all, what keeps most information, or all but the outermost."""
    per_channel: bool = True
    """A scale for each output channel of a weight, instead of one for the whole."""
    symmetric: bool = False
    """Activations around zero, signed, instead of between their smallest and largest value."""
    smooth: float = Field(0.7, ge=0, le=1)
    """How much of the activations' size moves into the weights first (SmoothQuant's alpha); 0: nothing."""


class Gpu(_Options):
    """Where and how instances run on GPUs. Set in models.yaml under `gpu:`."""

    devices: tuple[Annotated[int, Field(ge=0)], ...] = Field((0,), min_length=1)
    """CUDA device numbers; each runs --instances of the engine."""
    memory_limit_mb: int | None = Field(None, ge=1)
    """The most that ONNX Runtime's arena takes on a device; without it all there is."""
    arena_extend_strategy: Literal["kNextPowerOfTwo", "kSameAsRequested"] = "kSameAsRequested"
    """How ONNX Runtime's arena grows: kSameAsRequested wastes less where several models share a device."""
    cudnn_conv_algo_search: Literal["EXHAUSTIVE", "HEURISTIC", "DEFAULT"] = "HEURISTIC"
    """How cuDNN's convolutions are chosen, in models that have some: EXHAUSTIVE tries all at each new shape."""
    cuda_graphs: bool = False
    """Capture a plan's calls of its profiles' optimal shapes as CUDA graphs."""


class Profile(_Options):
    """One TensorRT optimisation profile: rows and tokens, the least, the ones it is tuned for, the most."""

    min: tuple[int, int] = (1, 1)
    opt: tuple[int, int]
    max: tuple[int, int]

    @model_validator(mode="after")
    def _ordered(self) -> Profile:
        for what, least, best, most in zip(("rows", "tokens"), self.min, self.opt, self.max, strict=True):
            if not 1 <= least <= best <= most:
                raise ValueError(f"a profile's {what} must be 1 <= min <= opt <= max, found {least}, {best}, {most}")
        return self


class TensorRT(_Options):
    """How TensorRT's engines are made. Set in models.yaml under `tensorrt:`."""

    profiles: tuple[Profile, ...] = ()
    """Together they must take every call; made from --max-batch-size and --max-length when left out."""
    workspace_mb: int | None = Field(None, ge=1)
    """Memory that a tactic may use while it runs; without it all of the device's."""
    optimization_level: int = Field(3, ge=0, le=5)
    """How long TensorRT looks for fast tactics."""
    engine_folder: str = "/engines"
    """Where ONNX Runtime's TensorRT keeps engines and timings, inside the container."""


class VLLM(_Options):
    """What --engine vllm hands to vLLM. Set in models.yaml under `vllm:`."""

    tensor_parallel_size: int = Field(1, ge=1)
    """GPUs that share each layer."""
    pipeline_parallel_size: int = Field(1, ge=1)
    """Groups of GPUs that share the layers between them."""
    gpu_memory_utilization: float = Field(0.9, gt=0, le=1)
    """The share of each GPU's memory that weights and cache may take."""
    models_folder: str = "/models"
    """Where the container sees this repository: a local checkpoint is copied into it and named by that path."""
    arguments: Mapping[str, bool | int | float | str] = {}
    """Other fields of vLLM's AsyncEngineArgs."""


class BuildSpec(_Options):
    """One model to build. A field with a `flag` is also an option of the command line."""

    model: str
    """Hub id, or a local folder of transformers or sentence-transformers."""
    task: str | None = Field(None, json_schema_extra={"flag": True})
    """What the model is served for; inferred from the checkpoint when left out."""
    name: str | None = Field(None, json_schema_extra={"flag": True})
    """The model's name in Triton; the last part of MODEL when left out."""
    output: Path = Field(Path("model_repository"), json_schema_extra={"flag": True})
    """The repository to publish into."""
    revision: str | None = Field(None, json_schema_extra={"flag": True})
    """Branch, tag or commit on the Hub."""
    precision: Literal["fp32", "fp16", "bf16", "int8", "int8-static", "int8-weights", "int4-weights", "fp8", "auto"] = (
        Field("fp32", json_schema_extra={"flag": True})
    )
    """int8: weights, and activations as they come; int8-static and fp8: activations by ranges measured on the samples;
    int8-weights, int4-weights: weights in blocks; auto: the fastest that keeps --quality."""
    engine: Literal["onnxruntime", "openvino", "tensorrt", "vllm", "auto"] | None = Field(
        None, json_schema_extra={"flag": True}
    )
    """What runs the graph; auto: the faster, measured here. When left out: the first that has the precision, or
    with --precision auto the fastest. vllm: nothing is exported, Triton's vLLM backend runs the checkpoint."""
    level: Literal["O1", "O2", "O3", "O4"] = Field("O2", json_schema_extra={"flag": True})
    """Graph optimisation as Optimum counts it: basic, fusions, fusions with an approximate GELU, the same in fp16."""
    graph: Path | None = Field(None, json_schema_extra={"flag": True})
    """An ONNX graph of an encoder to serve as it is, such as one in QDQ form from quantisation-aware training."""
    prune: float | None = Field(None, gt=0, lt=1, json_schema_extra={"flag": True})
    """The share of an encoder's layers to remove, heads and neurons that matter least on the samples."""
    quality: float | None = Field(None, ge=0, le=1, json_schema_extra={"flag": True})
    """The least mean agreement with PyTorch on the samples; the task's own when left out."""
    perplexity: float = Field(1.05, ge=1, json_schema_extra={"flag": True})
    """The most a generating model's perplexity on the samples may grow, as a ratio to PyTorch's."""
    block_size: int = Field(32, json_schema_extra={"flag": True})
    """Inputs that share a scale in int8-weights and int4-weights: 16, 32, 64, 128 or 256."""
    asymmetric: bool = Field(False, json_schema_extra={"flag": True})
    """Give each block of int8-weights and int4-weights a zero point."""
    slots: int = Field(16, ge=1, le=512, json_schema_extra={"flag": True})
    """Sequences that a generating model decodes at once; each has room for --max-length tokens."""
    beams: int | None = Field(None, ge=1, le=64, json_schema_extra={"flag": True})
    """The most beams of one search; what the checkpoint prefers, or for a decoder --slots, when left out."""
    max_answer: int | None = Field(None, ge=2, json_schema_extra={"flag": True})
    """The most tokens of an encoder-decoder model's answer; what the checkpoint prefers, or 256, when left out."""
    cache: Literal["fp32", "int8"] = Field("fp32", json_schema_extra={"flag": True})
    """Keys and values of a generating model; int8 needs ONNX Runtime 1.31 or later in Triton's interpreter."""
    executor: Literal["in-process", "bls"] = Field("in-process", json_schema_extra={"flag": True})
    """Where decode steps run: inside NAME, the cache in place, or as a Triton model NAME_model of its own."""
    samples: Path | None = Field(None, json_schema_extra={"flag": True})
    """JSON lines of the task's inputs, to verify and to measure on."""
    target: Literal["cpu", "cuda", "tensorrt"] = Field("cpu", json_schema_extra={"flag": True})
    """What the repository runs on: a CPU, a GPU, or a GPU through TensorRT (a plan, compiled there; with
    --engine onnxruntime by ONNX Runtime as it loads)."""
    triton: str = Field(NEWEST, json_schema_extra={"flag": True})
    """The Triton release that it must load on, and answer right on; the newest that is known when left out."""
    max_batch_size: int = Field(64, ge=1, json_schema_extra={"flag": True})
    """The most requests rows the front model batches."""
    max_queue_delay_us: int = Field(0, ge=0, json_schema_extra={"flag": True})
    """How long a request may wait for others; without a delay requests batch while the model is busy."""
    instances: int = Field(1, ge=1, json_schema_extra={"flag": True})
    """Engine instances."""
    threads: int | None = Field(None, ge=1, json_schema_extra={"flag": True})
    """Threads of each engine instance; cores / instances when left out."""
    max_length: int | None = Field(None, ge=3, json_schema_extra={"flag": True})
    """The most tokens of one text; the checkpoint's own when left out."""
    truncate: bool = Field(False, json_schema_extra={"flag": True})
    """Cut texts that are too long, and say so, instead of refusing them."""
    pooling: Literal["cls", "mean", "max", "lasttoken"] | None = Field(None, json_schema_extra={"flag": True})
    """How token features become one embedding, where the checkpoint does not say."""
    serving: Serving = Serving()
    calibration: Calibration = Calibration()
    gpu: Gpu = Gpu()
    tensorrt: TensorRT = TensorRT()
    vllm: VLLM = VLLM()

    @model_validator(mode="before")
    @classmethod
    def _engines_have_targets(cls, options: Any) -> Any:
        """An engine that runs nowhere else is a target too."""
        only = {"tensorrt": "tensorrt", "vllm": "cuda"}
        if isinstance(options, dict) and options.get("engine") in only and "target" not in options:
            return {**options, "target": only[options["engine"]]}
        return options

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
                f"the name {self.entry_name!r} is no model name: use letters, digits, '.', '_' and '-', "
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
        allowed = {"cpu": ("onnxruntime", "openvino", "auto"), "cuda": ("onnxruntime", "vllm")}
        engines = allowed.get(self.target, ("tensorrt", "onnxruntime"))
        if self.engine is not None and self.engine not in engines:
            raise ValueError(f"--engine {self.engine} is not of --target {self.target}, which has {', '.join(engines)}")
        meant = {
            "gpu": (self.gpu != Gpu() and self.target == "cpu", "--target cuda or tensorrt"),
            "gpu.cuda_graphs": (self.gpu.cuda_graphs and not self.makes_plan, "plans: --target tensorrt"),
            "tensorrt": (self.tensorrt != TensorRT() and self.target != "tensorrt", "--target tensorrt"),
            "vllm": (self.vllm != VLLM() and self.engine != "vllm", "--engine vllm"),
        }
        for name, (useless, where) in meant.items():
            if useless:
                raise ValueError(f"`{name}:` is for {where}")
        cores = available_cores()
        if self.target == "cpu" and self.threads is not None and self.threads * self.instances > cores:
            raise ValueError(
                f"{self.instances} instances of {self.threads} threads exceed the {cores} cores here; "
                "use fewer of either"
            )
        return self

    @property
    def entry_name(self) -> str:
        """The name of the front model."""
        return self.name if self.name is not None else Path(self.model.rstrip("/")).name

    @property
    def makes_plan(self) -> bool:
        """Whether what is built is a TensorRT plan."""
        return self.target == "tensorrt" and self.engine in (None, "tensorrt")

    @property
    def fits(self) -> bool:
        """Whether something is fitted to the samples, so that it must be judged on others."""
        return self.precision in ("int8-static", "fp8", "auto") or self.prune is not None

    @property
    def threads_per_instance(self) -> int:
        return self.threads or max(1, available_cores() // self.instances)


def available_cores() -> int:
    """The cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def make_spec(**options: Any) -> BuildSpec:
    """BuildSpec(**options), with errors a user can act on. Raises SpecError."""
    try:
        return BuildSpec(**options)
    except ValidationError as error:
        raise SpecError(_explain(error, options.get("model"))) from None


def load_specs(path: Path) -> list[BuildSpec]:
    """Read a models.yaml: a mapping with `models`, and `defaults` for all of them. Raises SpecError.

    defaults: {triton: "25.08"}
    models:
      - {model: org/name, precision: int8}
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
