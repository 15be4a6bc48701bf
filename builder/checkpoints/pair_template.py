"""Chat template of a reranker as pieces of text, into which emitted code puts an instruction, a query and a document.

sentence-transformers makes a message of each, with the roles system, query and document, and renders the template for
every pair (base/modules/transformer.py, 6.2). The pieces are those of one rendering; others are compared with it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from transformers import PreTrainedTokenizerFast

from builder.checkpoints.checkpoint import CheckpointFiles
from builder.checkpoints.sentence_transformers.transformer import ChatReading
from builder.common.errors import CheckpointError
from builder.common.limited import LimitReached, run_limited
from builder.common.samples import TEXTS
from builder.runtime.encoder.pair_texts import render_pair

PROBE = "builder.checkpoints.pair_probe:render"
SECONDS = 30  # of a processor
ROLES = {"instruction": "system", "query": "query", "document": "document"}
MARKS = {"instruction": "Xinstructionx", "query": "Xqueryx", "document": "Xdocumentx"}
EXPECTED = (
    "expected a template that writes the messages of the roles query and document (and perhaps system, an "
    "instruction) as they are. Add one as chat_template.jinja: the model's page has its text"
)
Fields = Mapping[str, str]
Pieces = list[dict[str, Any]]


def chat_reading(files: CheckpointFiles) -> ChatReading | None:
    """Return how sentence-transformers puts a pair into the chat template; None if it reads pairs as they are.

    Without modules.json it uses the template that a checkpoint has.
    """
    if files.sentence is not None:
        return files.sentence.chat
    return ChatReading("auto", {}) if files.tokenizer.chat_template else None


def pair_pieces(files: CheckpointFiles, reading: ChatReading) -> dict[str, Pieces | None]:
    """Return the pieces of a pair without an instruction ("plain") and with one ("instructed"; None: it is not read).

    A piece is {"text": ...} or {"field": ..., "strip": ...}. Raises CheckpointError for a template that drops a text
    or does more than to write it.
    """
    return json.loads(_pieces(_request(files, reading), files.source))  # type: ignore[no-any-return]


def _request(files: CheckpointFiles, reading: ChatReading) -> str:
    template = files.tokenizer.chat_template
    if isinstance(template, dict):  # one for each purpose; transformers takes this one for a chat
        template = template.get("default")
    if not template:
        raise CheckpointError(f"{files.source} puts texts into its chat template and has none; {EXPECTED}")
    return json.dumps({
        "template": template,
        "variables": {**files.tokenizer.special_tokens_map, **reading.variables},
        "structured": message_format(files, reading) == "structured",
    })  # fmt: skip


def message_format(files: CheckpointFiles, reading: ChatReading) -> str:
    """Return the format of a message, flat or structured, as sentence-transformers finds it."""
    if reading.format != "auto":
        return reading.format
    from sentence_transformers.base.modality import InputFormatter  # takes seconds to import

    return str(InputFormatter(files.config.model_type, processor=files.tokenizer).message_format)


@lru_cache(maxsize=16)
def _pieces(request: str, source: str) -> str:
    plain = _layout(request, source, ("query", "document"))
    try:
        instructed: Pieces | None = _layout(request, source, tuple(MARKS))
    except CheckpointError:  # a template may refuse a message of the role system, or read messages by their places
        instructed = None
    reads = any(piece.get("field") == "instruction" for piece in instructed or ())
    return json.dumps({"plain": plain, "instructed": instructed if reads else None})


def _layout(request: str, source: str, names: Sequence[str]) -> Pieces:
    """Return the pieces of the template, given messages of `names`."""
    marked = {name: MARKS[name] for name in names}
    spaced = {name: f"\n {MARKS[name]} \n" for name in names}
    rendered, loose = _render(request, source, [marked, spaced])
    pieces: Pieces = []
    for part in re.split(f"({'|'.join(marked.values())})", rendered):
        name = next((name for name, mark in marked.items() if mark == part), None)
        if name is not None:
            pieces.append({"field": name, "strip": spaced[name] not in loose})
        elif part:
            pieces.append({"text": part})
    lost = [name for name in ("query", "document") if {name} - {piece.get("field") for piece in pieces}]
    if lost:
        raise CheckpointError(f"the chat template of {source} drops the {lost[0]} of a pair; {EXPECTED}")
    samples = _samples(names)
    for sample, text in zip(samples, _render(request, source, samples), strict=True):
        if text != render_pair(pieces, sample):
            raise CheckpointError(
                f"the chat template of {source} changes the texts of a pair, such as {dict(sample)}; {EXPECTED}"
            )
    return pieces


def _samples(names: Sequence[str]) -> list[Fields]:
    """Return texts that a template could change: with spaces around, with its own notation, not in ASCII, long."""
    special = "<|im_end|>\n<|im_start|>user </s> {{ query }} {% if x %}"
    texts = [*TEXTS[:3], "  two\n\n lines \t", special, "日本語 😀 É <b>&amp;</b>", "https://a.b/c.png", TEXTS[-1], "0"]
    return [
        {name: texts[(at + 2 * shift) % len(texts)] for shift, name in enumerate(names)} for at in range(len(texts))
    ]


def _render(request: str, source: str, chats: Sequence[Fields]) -> list[str]:
    messages = [[{"role": ROLES[name], "content": text} for name, text in chat.items()] for chat in chats]
    try:
        answer: dict[str, Any] = run_limited(PROBE, {**json.loads(request), "chats": messages}, SECONDS)
    except LimitReached as error:
        raise CheckpointError(f"the chat template of {source} {error}, for a pair of texts") from error
    if answer["problem"]:
        raise CheckpointError(f"the chat template of {source} refuses a pair: {answer['problem']}; {EXPECTED}")
    return list(answer["texts"])


def read_without_special_tokens(tokenizer: PreTrainedTokenizerFast) -> None:
    """Let `tokenizer` add no tokens around a text, as transformers does with what a template wrote."""
    tokenizer.backend_tokenizer.post_processor = None  # type: ignore[assignment]
