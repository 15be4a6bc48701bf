"""Define serving.json, which configures the Python that a build emits. Only this module reads and writes it.

A folder beside it may contain the serving.json of a draft model. hosted.py defines hosted.json.

Standard library only, Python 3.10: the build imports this module, and a copy of it is emitted with every model.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Union

from .typed_json import ContractError as ContractError
from .typed_json import document_of, read_as

FILE = "serving.json"
DRAFT = "draft"  # folder with serving.json and graph of a draft model, beside those of the model that answers
# Property that all rows of a call must share: nothing (None), their length, or how often the token of this id occurs.
Alike = Union[Literal["length"], int, None]
CacheType = Literal["float32", "float16", "bfloat16", "int8", "uint8"]  # of keys and values
SKIPPED_COST = 0.25  # cost, in tokens, of one that the engine skips: attention reads it, and keeps its keys and values
SCHEMA = 3  # incremented when a field changes its name, its type or its meaning
REBUILD = "Build the model again"  # the remedy if serving.json does not fit


@dataclass(frozen=True)
class Batching:
    """Limits and costs for cutting the rows of a batch into engine calls; see encoder/cutting.py."""

    token_budget: int  # padded tokens of one call, at most; one that the engine skips counts as SKIPPED_COST
    max_rows: int
    call_cost: int  # cost of a call besides its tokens, in tokens
    buckets: Sequence[Sequence[int]] = ()  # (rows, tokens) that calls are padded to, if the engine needs that
    alike: Alike = None
    shares_prefixes: bool = False  # True if the engine computes equal beginnings of rows once, and skips padding

    @property
    def skipped_cost(self) -> float:
        """Cost, in tokens, of a padded token that repeats another row's beginning or is padding."""
        return SKIPPED_COST if self.shares_prefixes else 1.0

    @property
    def padded_budget(self) -> int:
        """Padded tokens of one call, at most, however many of them the engine skips."""
        return int(self.token_budget / self.skipped_cost)


@dataclass(frozen=True)
class RequestLimits:
    """Limits of one request: an oversized request would delay all others."""

    request_bytes: int = 1 << 20  # all texts together
    list_values: int = 1000  # length of one list
    request_tokens: int = 1 << 17  # in the rows for the engine, without padding; encoders only


@dataclass(frozen=True)
class Session:
    """Options for opening graphs in this process, with a decode loop's engine or with ONNX Runtime.

    `threads`: threads of one operator; 0: all cores. `entries`: ONNX Runtime's session configuration, or properties of
    OpenVINO's CPU plugin.
    """

    engine: str = "onnxruntime"  # in process
    device: Literal["cpu", "cuda"] = "cpu"
    threads: int = 0
    entries: Mapping[str, str] = field(default_factory=dict)
    device_id: int = 0
    provider_options: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class OpenVinoSession:
    """Options with which OpenVINO opens a model in this process.

    `threads`: as in Session; `precision`: of floating-point products.
    """

    precision: Literal["fp32", "bf16"]
    threads: int = 0


@dataclass(frozen=True)
class EncoderServing:
    """Configuration of a front model that answers a batch with one engine call."""

    task: str  # the module in encoder/tasks/
    executor: str  # the module in encoder/executors/: bls, or the engine that runs in process
    max_length: int  # tokens of one text, special tokens included
    truncate: bool  # True if longer texts are cut by default
    inputs: Mapping[str, str]  # graph input -> the attribute of an encoding that feeds it, or "task"
    outputs: Sequence[str]
    pad: Mapping[str, int]  # graph input -> its padding value, if not 0
    batching: Batching
    parameters: Mapping[str, Any]  # options that only the task reads
    engine: str | None = None  # the Triton model that runs the graph, through BLS
    model: str | None = None  # file of the graph, in process
    session: Session | OpenVinoSession | None = None  # in process
    warm_up: Sequence[Mapping[str, Sequence[int]]] = ()  # input rows of the warm-up calls, in process
    truncation_side: Literal["left", "right"] = "right"
    not_on_cpus_with: Sequence[str] = ()  # instruction sets with which the engine would answer differently
    needs_cpus_with: Sequence[str] = ()  # instruction sets of which x86 needs one, or the engine's sums overflow
    limits: RequestLimits = RequestLimits()
    queue: int = 0  # requests that may wait; 0: any number, or as many as Triton's own queue takes
    queue_timeout_ms: int = 0  # how long each may wait; 0: no limit


@dataclass(frozen=True)
class LayerShape:
    """Keys, and values, that one layer caches: `heads` of `size` numbers a token; none if it caches nothing.

    `states`: the shapes of what the layer keeps besides, in float32, whatever the length of a sequence.
    """

    heads: int
    size: int
    states: Sequence[Sequence[int]] = ()


@dataclass(frozen=True)
class Arena:
    """Keys and values of all running sequences."""

    slots: int
    length: int  # tokens of a slot
    dtype: CacheType
    layers: Sequence[LayerShape]
    blocks: int | None = None  # blocks that slots share, if the engine has them; None: each slot has its own memory


@dataclass(frozen=True)
class Language:
    """Tokens that select a language: `before` and `after` a source text, and the `first` of an answer."""

    before: Sequence[int]
    after: Sequence[int]
    first: int


@dataclass(frozen=True)
class EncoderInput:
    """Input of an encoder-decoder's encoder."""

    max_length: int  # tokens
    layers: Sequence[LayerShape]  # of cross-attention
    encoder: str  # file of its graph
    token_budget: int  # padded tokens of one encoder call, at most
    start: int  # the token that every answer starts from
    first: int | None = None  # the token that is forced after it
    prefix: str = ""
    pairs: Mapping[str, str] = field(default_factory=dict)  # "en to de" -> the instruction for it
    languages: Mapping[str, Language] = field(default_factory=dict)
    source_language: str | None = None
    target_language: str | None = None


@dataclass(frozen=True)
class TokenBias:
    """Bias added to the score of the last of `tokens` if the others were just generated."""

    tokens: Sequence[int]
    bias: float


@dataclass(frozen=True)
class Decay:
    """transformers' exponential_decay_length_penalty: after `start` tokens the end becomes more likely by `factor`."""

    start: int
    factor: float


@dataclass(frozen=True)
class TokenRules:
    """Tokens that every answer must, must not, or should have: the checkpoint's generation_config."""

    bad_words: Sequence[Sequence[int]] = ()  # runs of tokens that are never completed
    sequence_bias: Sequence[TokenBias] = ()
    suppressed: Sequence[int] = ()
    begin_suppressed: Sequence[int] = ()  # banned as the first token of an answer
    decay: Decay | None = None
    last: Sequence[int] = ()  # one of them is forced last if an answer reaches its maximum length


@dataclass(frozen=True)
class Thinking:
    """Marks around a model's reasoning.

    `special`: True if they are special tokens, which text leaves out; `switch`: True if a variable of the template
    turns reasoning on and off.
    """

    begin: str
    end: str
    special: bool = False
    switch: bool = False


@dataclass(frozen=True)
class Chat:
    """Chat template of the checkpoint, its named tokens and its capabilities."""

    template: str
    special_tokens: Mapping[str, Any] = field(default_factory=dict)
    tool_template: str | None = None  # for requests with tools, if the checkpoint has a separate one
    tool_parser: str | None = None  # parser of the checkpoint's notation of tool calls, if known
    part_roles: Sequence[str] = ()  # roles whose messages the template reads in parts; clients join the parts of others
    thinking: Thinking | None = None  # if the template supports reasoning


@dataclass(frozen=True)
class GenerationServing:
    """Configuration of a decode loop."""

    task: str
    executor: Literal["in-process", "bls"]
    arena: Arena
    session: Session
    vocabulary: int  # number of logits at a position
    queue: int  # sequences that may wait; 0: any number
    beams: int  # maximum of one search
    max_tokens: int  # of an answer, unless the request sets it
    end_ids: Sequence[int]  # tokens that end an answer
    fields: Sequence[str]  # the input tensors of a request
    defaults: Mapping[str, Any]  # options that a request does not set
    prefill_tokens: int | None = None  # prompt tokens between two decode steps; None for an encoder-decoder
    model: str | None = None  # file of the decoder's graph, in process
    copier: str | None = None  # file of the graph that copies a slot, in process on a GPU
    engine: str | None = None  # the Triton model that runs the graph, through BLS
    inputs: Sequence[str] = ()  # of the graph
    outputs: Sequence[str] = ()
    total_length: int | None = None  # tokens of prompt and answer together, unless the request sets it
    queue_timeout_ms: int = 0  # how long a request may wait for its turn; 0: no limit
    prefix_cache: bool = False
    rules: TokenRules = TokenRules()
    source: EncoderInput | None = None  # of an encoder-decoder
    chat: Chat | None = None
    fill: str | None = None  # the mark at which the tokeniser splits a text to be filled in, if it has one
    clean_up: bool = False  # True if spaces before punctuation are removed from answers (spaces.py)
    needs_cpus_with: Sequence[str] = ()  # as of an encoder
    limits: RequestLimits = RequestLimits()
    hidden_size: int = 0  # of a draft that reads hidden states of its target: how many numbers a token; else 0
    drafts_in_place: bool = False  # of such a draft: see HiddenStatesDrafter

    @property
    def executor_module(self) -> str:
        """Module in generation/executors/ that runs the graph: named after the engine, its device and its cache."""
        if self.executor == "bls":
            return "bls" if self.session.device == "cpu" else f"bls_{self.session.device}"
        if self.source is not None:
            return f"{self.session.engine}_seq2seq"
        if self.hidden_size:
            return f"{self.session.engine}_hidden_states"
        if self.session.device == "cpu":
            return self.session.engine
        return f"{self.session.engine}_{self.session.device}" + ("" if self.arena.blocks is None else "_blocks")

    @property
    def prompts_module(self) -> str:
        """Module in generation/ that reads the input of a request."""
        if self.source is not None:
            return "source_texts"
        return "decoder_prompts" if self.chat is None else "chat_prompts"


@dataclass(frozen=True)
class SharedServing:
    """Configuration of a front that serves many encoders of one task, in one process."""

    task: str  # the same for all of them, as in config.pbtxt
    repository: str  # folder of their versions and of hosted.json, beside the version folders
    memory_mb: int  # limit of the process, in MiB; above it, the least recently requested models are evicted
    queue: int = 0  # requests that may wait for each model; 0: any number
    queue_timeout_ms: int = 0  # how long each may wait; 0: no limit


Serving = Union[EncoderServing, GenerationServing]
Document = Union[Serving, SharedServing]
KINDS: Mapping[str, type[Any]] = {
    "encoder": EncoderServing,
    "generation": GenerationServing,
    "shared": SharedServing,
}


def dump(serving: Document) -> str:
    """Return `serving` as the text of serving.json."""
    kind = next(name for name, kind in KINDS.items() if isinstance(serving, kind))
    document = {"schema": SCHEMA, "kind": kind, **dataclasses.asdict(serving)}
    return json.dumps(document, indent=1, ensure_ascii=False)


def load_encoder(folder: Path) -> EncoderServing:
    """Read serving.json of a front model with one call a batch. Raises ContractError."""
    serving = load(folder)
    if not isinstance(serving, EncoderServing):
        raise ContractError(f"{folder / FILE} is of a model that generates; expected one of an encoder")
    return serving


def load_generation(folder: Path) -> GenerationServing:
    """Read serving.json of a decode loop. Raises ContractError."""
    serving = load(folder)
    if not isinstance(serving, GenerationServing):
        raise ContractError(f"{folder / FILE} is of an encoder; expected one of a model that generates")
    return serving


def load_shared(folder: Path) -> SharedServing:
    """Read serving.json of a shared front. Raises ContractError."""
    serving = read(folder)
    if not isinstance(serving, SharedServing):
        raise ContractError(f"{folder / FILE} is of a model of its own; expected one of a shared front")
    return serving


def load(folder: Path) -> Serving:
    """Read serving.json of a model of its own. Raises ContractError."""
    serving = read(folder)
    if isinstance(serving, SharedServing):
        raise ContractError(f"{folder / FILE} is of a shared front, which hosts models; expected one of a model")
    return serving


def read(folder: Path) -> Document:
    """Read serving.json in `folder`. Raises ContractError if another version wrote it, or it is damaged."""
    path = folder / FILE
    document = document_of(path, SCHEMA, REBUILD)
    kind = document.pop("kind", None)
    if not isinstance(kind, str) or kind not in KINDS:
        raise ContractError(f"{path} is of the kind {kind!r}; known are {', '.join(KINDS)}. {REBUILD}")
    serving: Document = read_as(KINDS[kind], document, path.name, REBUILD)
    return serving
