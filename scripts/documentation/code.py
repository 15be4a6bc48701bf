"""Tables of facts in the code: tasks, request options, architectures, Triton releases."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from builder.checkpoints.tasks import all_tasks
from builder.checkpoints.tasks.base import EncoderTask
from builder.common.cards import CARDS
from builder.common.releases import GPU_WHEELS, RELEASES
from builder.runtime.adapter_files import ADAPTER
from builder.runtime.fields import Field
from builder.runtime.generation.dialects import FOREIGN, FOREIGN_OUTPUTS
from builder.runtime.generation.options import (
    COMMON,
    LANGUAGES,
    PROMPT,
    RANGES,
    SOURCE,
    UNSET_SEED,
    RequestOptions,
)
from scripts.documentation.markdown import table
from tests.decoders import DECODERS
from tests.seq2seqs import SEQ2SEQS
from tests.tiny_encoders import ARCHITECTURES

PARAMETERS: dict[str, Any] = {
    "prompts": {},
    "pooled": True,
    "size": "size",
    "vector_size": "size",
    "languages": True,
    "template": {"instructed": True},
}
MEANINGS = {  # of each request option of a generating model
    "text_input": "the prompt, or the text to read",
    "input_ids": "the prompt as token ids of the model, instead of `text_input`",
    "messages": "a chat as a JSON list of messages, instead of `text_input`; the checkpoint's template is applied",
    "max_tokens": "maximum number of generated tokens; default: the checkpoint's limit or 128, within the model's",
    "min_tokens": "minimum number of tokens before the answer may end",
    "temperature": "0: greedy decoding, the default unless the checkpoint samples; a request with another sampling "
    "option samples at 1.0",
    "top_k": "sample from the k most probable tokens; 0: from all",
    "top_p": "sample from the smallest set of tokens with this total probability",
    "min_p": "drop tokens below this share of the best token's probability",
    "typical_p": "locally typical sampling",
    "repetition_penalty": "divide the logits of tokens that occurred",
    "presence_penalty": "subtracted from the logits of generated tokens",
    "frequency_penalty": "subtracted for each time a token was generated",
    "no_repeat_ngram_size": "no n-gram of this length occurs twice; 0: off",
    "encoder_no_repeat_ngram_size": "no n-gram of this length is copied from the input; 0: off",
    "logit_bias": "JSON object: token ids and the values added to their logits",
    "bad_words": "texts that are never generated",
    "stop_words": "texts, or special tokens, that end the answer; they are not part of it",
    "stop_token_ids": "token ids that end the answer",
    "random_seed": "the same seed and request give the same answer",
    "n": "number of answers",
    "num_beams": "beams of beam search; 1: off",
    "length_penalty": "exponent of the length in a beam's score",
    "early_stopping": "when beam search ends: `true`, `false` or `never`, as in transformers",
    "source_language": "language of the text, for multilingual models",
    "target_language": "language of the answer, for multilingual models",
    "logprobs": "report this many log-probabilities for each token",
    "ignore_eos": "continue after the end token",
    "return_perf_metrics": "also return `cached_tokens` and `queue_seconds`",
    "skip_special_tokens": "leave special tokens out of the text",
    "tools": "tools that the model may call, as a JSON list, for a chat template that supports tools",
    "chat_template_kwargs": 'variables of the chat template, as a JSON object: `{"enable_thinking": false}`',
    "reasoning_effort": "`none`, `minimal`, `low`, `medium`, `high`, `xhigh` or `max`, for a chat template that reads "
    "it or turns thinking on and off",
    "continue_final_message": "continue the last message instead of answering it",
    "echo": "repeat the prompt in the answer",
    "guide": "constraint on the answer, as JSON: see [guides](#guides)",
    "tokenize": "return the prompt's tokens in `tokens`, and generate nothing",
    "prompt_logprobs": "report log-probabilities of the prompt's tokens, and of this many alternatives for each",
    "lora_name": "adapter that answers, of a model [built with `--adapters`](../guides/adapters.md)",
    "stream": "send text as it is generated instead of one answer at the end",
    "priority": "requests with a lower number start first",
    "timeout_ms": "fail after this many milliseconds; 0: never",
}


def tasks() -> str:
    """Return each encoder task with the tensors of its front model; optional inputs in italics."""
    rows = []
    for task in all_tasks().values():
        if isinstance(task, EncoderTask):
            inputs, outputs = task.fields(PARAMETERS)
            rows.append((f"`{task.name}`", _fields(inputs), _fields(outputs)))
    return table(("task", "inputs", "outputs"), rows)


def generating_tasks() -> str:
    """Return each generating task with its inputs besides the common ones."""
    rows = []
    for task in all_tasks().values():
        if not isinstance(task, EncoderTask):
            inputs, outputs = task.fields(PARAMETERS)
            more = tuple(field for field in inputs if field not in (*COMMON, *FOREIGN))
            own = tuple(field for field in outputs if field not in FOREIGN_OUTPUTS)
            rows.append((f"`{task.name}`", _fields(more), _fields(own)))
    return table(("task", "inputs besides the common ones", "outputs"), rows)


def _fields(entries: tuple[Field, ...]) -> str:
    described = []
    for field in entries:
        text = f"`{field.name}` {_type(field)}"
        described.append(f"*{text}*" if field.optional else text)
    return ", ".join(described)


def _type(field: Field) -> str:
    dims = "" if field.dims == (1,) else f"[{', '.join('n' if d == -1 else str(d) for d in field.dims)}]"
    return f"{field.data_type.removeprefix('TYPE_')}{dims}"


def request_options() -> str:
    """Return every option of a request to a generating model. Raises SystemExit for an option without a description."""
    defaults = {field.name: field.default for field in fields(RequestOptions) if field.name != "temperature"}
    rows = []
    for field in (*COMMON, *PROMPT, ADAPTER, *SOURCE, *LANGUAGES):
        if field in FOREIGN:  # described together, in the page
            continue
        if field.name not in MEANINGS:
            raise SystemExit(f"the request option {field.name} has no description: add it to MEANINGS in {__file__}")
        low_high = RANGES.get(field.name)
        limits = "" if low_high is None else _limits(*low_high)
        rows.append((f"`{field.name}`", _type(field), _default(defaults.get(field.name)), limits, MEANINGS[field.name]))
    return table(("option", "type", "default", "allowed", "meaning"), rows)


def _limits(least: float, most: float) -> str:
    return f"≥ {least:g}" if most in (2**31, 2**63 - 1) else f"{least:g} to {most:g}"


def _default(value: Any) -> str:
    nothing = value in (None, "", (), UNSET_SEED) or not isinstance(value, (bool, int, float, str))
    return "" if nothing else f"`{json.dumps(value)}`"


def metrics(families: Sequence[tuple[str, str, str]]) -> str:
    """Return the metrics of a model on Triton's /metrics."""
    rows = []
    for name, kind, meaning in families:
        suffix = "_total" if kind == "COUNTER" else ""
        rows.append((f"`build_repo_{name}{suffix}`", kind.lower(), meaning))
    return table(("metric", "kind", "meaning"), rows)


def encoders() -> str:
    """Return each tested encoder and how its attention is exported."""
    rows = ((n, "fused" if a.fused else "separate operators", a.note) for n, a in ARCHITECTURES.items())
    return table(("model type", "attention", "note"), rows)


def decoders() -> str:
    """Return each tested decoder."""
    return table(("model type", "note"), ((name, decoder.note) for name, decoder in DECODERS.items()))


def seq2seqs() -> str:
    """Return each tested encoder-decoder."""
    return table(("model type", "note"), ((name, model.note) for name, model in SEQ2SEQS.items()))


def cards() -> str:
    """Return the cards of --gpu."""
    rows = ((f"`{name}`", card.compute_capability, f"{card.memory_mb / 1024:.3g} GB") for name, card in CARDS.items())
    return table(("card", "compute capability", "memory"), rows)


def gpu_wheels() -> str:
    """Return the cards, CUDA and drivers of each onnxruntime-gpu that runs in process, the newest first."""
    rows = []
    for version, wheel in reversed(GPU_WHEELS.items()):
        pythons = sorted({r.python for r in RELEASES.values() if r.in_process == version})
        kernels = ", ".join(wheel.kernels) + (f"; others from {wheel.ptx} on by PTX" if wheel.ptx else "")
        cards = ", ".join(f"`{name}`" for name, card in CARDS.items() if wheel.runs_on(card.compute_capability))
        rows.append((version, ", ".join(pythons), kernels, cards, wheel.cuda, wheel.driver))
    return table(("onnxruntime-gpu", "Python", "kernels for", "cards", "CUDA", "driver from"), rows)


def releases() -> str:
    """Return the contents of each Triton release, the newest first."""
    heads = ("Triton", "ONNX Runtime", "opset, IR", "in process", "TensorRT", "CUDA", "OpenVINO", "vLLM", "Python")
    rows = []
    for name, r in reversed(RELEASES.items()):
        carried = (r.in_process, r.tensorrt, r.cuda, r.openvino, r.vllm, r.python)
        rows.append((name, r.onnxruntime, f"{r.opset}, {r.ir_version}", *(version or "" for version in carried)))
    return table(heads, rows)
