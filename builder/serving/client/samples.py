"""Choose the requests for a served model: the user's own, or the defaults of the model's task."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from builder.common.errors import SpecError
from builder.common.samples import load_samples, with_mask
from builder.runtime.adapter_files import ADAPTER, ALL_ADAPTERS
from builder.runtime.encoder.task import HEADLESS
from builder.runtime.tokens import TOKENS
from builder.serving.client.client import Client

ANSWER_TOKENS = 32
FIXED = {"truncate": True, "max_tokens": ANSWER_TOKENS, "ignore_eos": True}  # set if the model has these inputs
AROUND = 8  # allowance for the tokens that a tokenizer adds to a text


def samples_for(client: Client, file: Path | None) -> Sequence[Mapping[str, Any]]:
    """Return the requests in `file`, or those of the model's task, which name an adapter if the model needs one.

    Raises SpecError if the model declares no task, or has no adapter.
    """
    if file is not None:
        return load_samples(file, client.signature.inputs)
    from builder.checkpoints.tasks import find_task  # imports torch

    task = client.signature.parameters.get("task")
    if task is None:
        raise SpecError(f"{client.name} does not say its task; give inputs for it with --samples FILE")
    mask = client.signature.parameters.get("mask_token", "")
    inputs = {field.name for field in client.signature.inputs}
    fixed: dict[str, Any] = {name: value for name, value in FIXED.items() if name in inputs}
    if HEADLESS in client.signature.parameters:
        adapters = json.loads(client.ask({"text_input": "-", ADAPTER.name: ALL_ADAPTERS})[TOKENS.name])
        if not adapters:
            raise SpecError(f"{client.name} answers only with adapters, and has none; add one with build-repo adapter")
        fixed[ADAPTER.name] = adapters[0]
    samples = [{**with_mask(sample, mask), **fixed} for sample in find_task(task).samples]
    return [_fitted(sample, client) for sample in samples]


def _fitted(sample: Mapping[str, Any], client: Client) -> Mapping[str, Any]:
    """Shorten a prompt and its answer to the model's context; in a short context the answer gets half.

    A decoder's prompt loses its last words. An encoder-decoder's text is kept, and its answer shortened.
    """
    limits = {name: int(client.signature.parameters.get(name, 0)) for name in ("max_total_tokens", "max_output_length")}
    total = limits["max_total_tokens"]
    if "max_tokens" not in sample or not any(limits.values()):
        return sample
    answer = min(ANSWER_TOKENS, max(1, total // 2) if total else limits["max_output_length"])
    text = sample["text_input"]
    while total and len(text.encode()) + AROUND > total - answer:  # a token has at least a byte
        tokens, words = len(json.loads(client.ask({"text_input": text, "tokenize": True})["tokens"])), text.split(" ")
        if tokens <= total - answer or len(words) == 1:
            break
        text = " ".join(words[: min(len(words) - 1, max(1, len(words) * (total - answer) // tokens))])
    return {**sample, "text_input": text, "max_tokens": answer}
