"""serving.json: what a build tells the Python that it emits. Written and read here and nowhere else.

Beside it hosted.json: which models a shared front hosts; and a folder of its own with that of a draft model.

Standard library only, Python 3.10: the build imports this module, and a copy of it is emitted with every model.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Union

from .typed_json import ContractError as ContractError
from .typed_json import document_of, read_as

FILE = "serving.json"
HOSTED = "hosted.json"
DRAFT = "draft"  # folder with serving.json and graph of a model that guesses, beside those of the one that answers
# What the rows of one call must have in common: nothing, their length, or how often they have a token, by its id.
Alike = Union[Literal["length"], int, None]
CacheType = Literal["float32", "float16", "bfloat16", "int8", "uint8"]  # of keys and values
SCHEMA = 3  # counts up when a field changes its name, its type or its meaning
BUILD = "Build the model again"  # what to do where serving.json does not fit
SHARE = "Share its models again: build-repo share"  # and where hosted.json does not


@dataclass(frozen=True)
class Batching:
    """How the rows of a batch are cut into engine calls; see encoder/cutting.py."""

    token_budget: int  # padded tokens of one call, at most
    max_rows: int
    call_cost: int  # what a call costs besides its tokens, in tokens
    buckets: Sequence[Sequence[int]] = ()  # (rows, tokens) that calls are padded to, where the engine wants that
    alike: Alike = None


@dataclass(frozen=True)
class RequestLimits:
    """What one request may bring, at most: one that is too large would keep all others waiting."""

    request_bytes: int = 1 << 20  # of its texts
    list_values: int = 1000  # of one list
    request_tokens: int = 1 << 17  # of the engine's rows, padding not counted; of an encoder


@dataclass(frozen=True)
class Session:
    """How the engine of a decode loop, and ONNX Runtime, open graphs in this process.

    `threads`: of one operator; 0 lets it take all cores. `entries`: ONNX Runtime's session configuration, or properties
    of OpenVINO's CPU plugin.
    """

    engine: str = "onnxruntime"  # in process, the module in generation/executors/
    device: Literal["cpu", "cuda"] = "cpu"
    threads: int = 0
    entries: Mapping[str, str] = field(default_factory=dict)
    device_id: int = 0
    provider_options: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class OpenVinoSession:
    """How OpenVINO opens a model in this process. `threads`: as a Session's; `precision`: of products of reals."""

    precision: Literal["fp32", "bf16"]
    threads: int = 0


@dataclass(frozen=True)
class EncoderServing:
    """A front model of one engine call a batch."""

    task: str  # the module in encoder/tasks/
    executor: str  # the module in encoder/executors/: bls, or the engine that runs in process
    max_length: int  # tokens of one text, special tokens included
    truncate: bool  # whether longer texts are cut where a request does not say
    inputs: Mapping[str, str]  # graph input -> the attribute of an encoding it is, or "task"
    outputs: Sequence[str]
    pad: Mapping[str, int]  # graph input -> the value that pads it, where that is not 0
    batching: Batching
    parameters: Mapping[str, Any]  # the task's own
    engine: str | None = None  # the Triton model that runs the graph, through BLS
    model: str | None = None  # file of the graph, in process
    session: Session | OpenVinoSession | None = None  # in process
    warm_up: Sequence[Mapping[str, Sequence[int]]] = ()  # rows of the engine's inputs for calls at load, in process
    truncation_side: Literal["left", "right"] = "right"
    not_on_cpus_with: Sequence[str] = ()  # instruction sets with which the engine would answer otherwise
    limits: RequestLimits = RequestLimits()
    queue: int = 0  # requests that may wait; 0: any number, or as many as Triton's own queue takes
    queue_timeout_ms: int = 0  # how long each may; 0: for ever


@dataclass(frozen=True)
class LayerShape:
    """Keys, and values, of one layer's attention: `heads` of `size` numbers a token."""

    heads: int
    size: int


@dataclass(frozen=True)
class Arena:
    """The keys and values of all running sequences."""

    slots: int
    length: int  # tokens that a slot holds
    dtype: CacheType
    layers: Sequence[LayerShape]
    blocks: int | None = None  # that slots share, where the engine has them; None: each slot has its own memory


@dataclass(frozen=True)
class Language:
    """How a model is told a language: tokens around the source text, and the first of an answer in it."""

    before: Sequence[int]
    after: Sequence[int]
    first: int


@dataclass(frozen=True)
class Source:
    """What an encoder-decoder reads before it answers."""

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
    """What is added to the score of the last of `tokens` where the others were just generated."""

    tokens: Sequence[int]
    bias: float


@dataclass(frozen=True)
class Decay:
    """transformers' exponential_decay_length_penalty: after `start` tokens the end becomes likelier by `factor`."""

    start: int
    factor: float


@dataclass(frozen=True)
class TokenRules:
    """Tokens that must, must not, or should rather come in every answer: the checkpoint's generation_config."""

    bad_words: Sequence[Sequence[int]] = ()  # runs of tokens that are never completed
    sequence_bias: Sequence[TokenBias] = ()
    suppressed: Sequence[int] = ()
    begin_suppressed: Sequence[int] = ()  # as the first of an answer
    decay: Decay | None = None
    last: Sequence[int] = ()  # one of them comes last, where an answer reaches its most tokens


@dataclass(frozen=True)
class Thinking:
    """The marks around a model's reasoning.

    `special`: whether they are special tokens, which text leaves out; `switch`: whether a variable of the
    template turns reasoning on and off.
    """

    begin: str
    end: str
    special: bool = False
    switch: bool = False


@dataclass(frozen=True)
class Chat:
    """The checkpoint's chat template, and what it knows by name."""

    template: str
    special_tokens: Mapping[str, Any] = field(default_factory=dict)
    tool_template: str | None = None  # of requests with tools, where the checkpoint has one for those
    tool_parser: str | None = None  # of the notation in which the checkpoint writes calls of tools, where it is known
    part_roles: Sequence[str] = ()  # whose messages in parts the template reads; for others clients join the texts
    thinking: Thinking | None = None  # of a template that knows reasoning


@dataclass(frozen=True)
class GenerationServing:
    """A decode loop."""

    task: str
    executor: Literal["in-process", "bls"]
    arena: Arena
    session: Session
    vocabulary: int  # logits of a position
    queue: int  # sequences that may wait; 0: any number
    beams: int  # of one search, at most
    max_tokens: int  # of an answer, where a request does not say
    end_ids: Sequence[int]  # tokens that end an answer
    fields: Sequence[str]  # the input tensors of a request
    defaults: Mapping[str, Any]  # options of a request, where it does not say
    prefill_tokens: int | None = None  # of prompts, between two decode steps; an encoder-decoder has none
    model: str | None = None  # file of the decoder's graph, in process
    copier: str | None = None  # file of the graph that copies a slot, in process on a GPU
    engine: str | None = None  # the Triton model that runs the graph, through BLS
    inputs: Sequence[str] = ()  # of the graph
    outputs: Sequence[str] = ()
    total_length: int | None = None  # tokens of prompt and answer, where a request does not say how long
    queue_timeout_ms: int = 0  # how long a request may wait for its turn; 0: for ever
    prefix_cache: bool = False
    rules: TokenRules = TokenRules()
    source: Source | None = None  # of an encoder-decoder
    chat: Chat | None = None
    fill: str | None = None  # the mark at which the tokeniser parts a text that is to be filled in, where it has one
    clean_up: bool = False  # whether answers lose the spaces before marks that their tokens have (spaces.py)
    limits: RequestLimits = RequestLimits()


@dataclass(frozen=True)
class SharedServing:
    """A front that answers for many encoders of one task, in one process."""

    task: str  # of all of them, as config.pbtxt says it
    repository: str  # folder of their versions and of hosted.json, beside the version folders
    memory_mb: int  # of the process, at most, in 2^20 bytes: models that were not asked for longest make room
    queue: int = 0  # requests that may wait for each model; 0: any number
    queue_timeout_ms: int = 0  # how long each may; 0: for ever


@dataclass(frozen=True)
class HostedModel:
    """What a shared front knows of a model before it loads it."""

    version: int  # that answers
    build: str  # of that version: another build of the same number has another one
    inputs: Mapping[str, bool]  # its tensors, and whether each may be left out
    outputs: Mapping[str, Sequence[int]]  # its tensors, and their dimensions without that of the batch
    parameters: Mapping[str, str]  # of its config.pbtxt
    max_batch_size: int


Serving = Union[EncoderServing, GenerationServing]
Document = Union[Serving, SharedServing]
KINDS: Mapping[str, type[Any]] = {
    "encoder": EncoderServing,
    "generation": GenerationServing,
    "shared": SharedServing,
}


def dump(serving: Document) -> str:
    """`serving` as the text of serving.json."""
    kind = next(name for name, kind in KINDS.items() if isinstance(serving, kind))
    document = {"schema": SCHEMA, "kind": kind, **dataclasses.asdict(serving)}
    return json.dumps(document, indent=1, ensure_ascii=False)


def load_encoder(folder: Path) -> EncoderServing:
    """Read serving.json of a front model of one call a batch. Raises ContractError."""
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
    """Read serving.json in `folder`. Raises ContractError where another version wrote it, or it is damaged."""
    path = folder / FILE
    document = document_of(path, SCHEMA, BUILD)
    kind = document.pop("kind", None)
    if not isinstance(kind, str) or kind not in KINDS:
        raise ContractError(f"{path} is of the kind {kind!r}; known are {', '.join(KINDS)}. {BUILD}")
    serving: Document = read_as(KINDS[kind], document, path.name, BUILD)
    return serving


def dump_hosted(entries: Mapping[str, Any]) -> str:
    """hosted.json of these models, a line each. `entries`: by name a HostedModel, or what `Hosted.entries` has."""
    plain = {n: dataclasses.asdict(e) if isinstance(e, HostedModel) else e for n, e in entries.items()}
    lines = [f"{json.dumps(name)}: {json.dumps(plain[name])}" for name in sorted(plain)]
    return f'{{"schema": {SCHEMA}, "models": {{\n' + ",\n".join(lines) + "\n}}\n"


class Hosted(Mapping[str, HostedModel]):
    """hosted.json of the repository `folder`: thousands of entries, each looked at when somebody asks for it.

    Raises ContractError where another version wrote it, or it is damaged.
    """

    def __init__(self, folder: Path) -> None:
        entries = document_of(folder / HOSTED, SCHEMA, SHARE).get("models")
        if not isinstance(entries, dict):
            raise ContractError(f"{folder / HOSTED} has no models. {SHARE}")
        self.entries = entries

    def __getitem__(self, name: str) -> HostedModel:
        model: HostedModel = read_as(HostedModel, self.entries[name], f"{HOSTED}.{name}", SHARE)
        return model

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)
