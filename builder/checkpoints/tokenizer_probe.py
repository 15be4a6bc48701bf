"""Try a tokenizer on texts made for it: expressions that do not end, and steps that multiply a text.

It runs in a process with limits (builder/common/limited.py), before the tokenizer is loaded in the build's own. The
tokenizers library searches with backtracking, by Oniguruma, which gives up on one match after 10 million steps, a third
of a second, but not on a search: a*a*b takes as long from each letter of a text on. The cost of an expression cannot be
read off it, so the probe tries texts made from each of its letters. Imports nothing heavy.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from builder.checkpoints.untrusted import read_object
from builder.runtime.panics import TokenizerError, call_tokenizer

LENGTH = 4096  # characters of a text that is tried
SPARE = "\x01"  # in no expression; all letters follow it, since an expression whose end is missing is not tried at all
COMMON = "a1 \n.'-_A0é中"
MAX_WRITTEN = 64  # characters and tokens for each character of a text; NFKC writes 18 for one
MAX_TOKEN = 10_000  # characters; the longest tokens of known vocabularies, runs of spaces, have hundreds


def probe(request: dict[str, Any]) -> str | None:
    """Return what is wrong with the tokenizer of `request`, continuing "the tokenizer ..."; None if nothing is.

    `tokenizer`: a tokenizer.json, or `file`: its path. `samples`: texts that it must tokenise. `beside`: JSON files
    whose strings are tried too, as they become tokens. A tokenizer that cannot be read passes: loading it says why.
    """
    try:
        text = request.get("tokenizer") or Path(request["file"]).read_text("utf-8")
        document = json.loads(text)
        tokenizer = call_tokenizer(Tokenizer.from_str, text)
    except (OSError, ValueError, RecursionError, TokenizerError):
        return None
    tokenizer.no_padding()  # to a length that happened to be set
    tokenizer.no_truncation()
    if (longest := max(map(len, tokenizer.get_vocab()), default=0)) > MAX_TOKEN:
        return f"has a token of {longest} characters, more than {MAX_TOKEN}"
    steps = {name: value for name, value in document.items() if name not in ("model", "added_tokens")}
    patterns, written = set(_strings_at(("Regex", "String"), steps)), set(_strings_at(("content", "prepend"), steps))
    for replacement in [*written, *(_replacement(value) for value in _strings_at(("precompiled_charsmap",), steps))]:
        if len(replacement) > MAX_WRITTEN:
            return f"writes {len(replacement)} characters, more than {MAX_WRITTEN}, in one place of a text"
    letters = sorted({letter for pattern in patterns for letter in pattern if letter.isalnum()} | set(COMMON))
    for piece in (*letters, *patterns, *written, *(re.sub(r"\W", "", pattern) for pattern in patterns)):
        if (problem := _growth(tokenizer, piece)) is not None:
            return problem
    end = SPARE + "".join(letters)
    for long in (*(letter * LENGTH + end for letter in letters), "".join(letters) * (LENGTH // len(letters)) + end):
        if (problem := _encoding(tokenizer, long)) is not None:
            return problem
    for beside in map(Path, request.get("beside", ())):
        for string in _strings(read_object(beside)):
            if (problem := _encoding(tokenizer, string)) is not None:
                return problem
    for sample in request.get("samples", ()):
        try:
            tokenizer.decode(call_tokenizer(tokenizer.encode, sample).ids)
        except TokenizerError as error:
            return f"fails on the text {sample[:40]!r} ({error})"
    return None


def longest_replacement(charsmap: bytes) -> str:
    """Return the longest text that a SentencePiece normaliser writes in one place.

    Its precompiled charsmap is the length of a trie, the trie, and the replacements, each ended by a zero byte
    (sentencepiece, src/normalizer.cc, DecodePrecompiledCharsMap).
    """
    replacements = charsmap[4 + int.from_bytes(charsmap[:4], "little") :]
    return max(replacements.decode("utf-8", errors="replace").split("\0"), key=len)


def _replacement(encoded: str) -> str:
    try:
        return longest_replacement(base64.b64decode(encoded))
    except ValueError:
        return ""


def _growth(tokenizer: Tokenizer, piece: str) -> str | None:
    if tokenizer.normalizer is None:
        return None
    try:
        written = len(call_tokenizer(tokenizer.normalizer.normalize_str, piece))
    except TokenizerError:
        return None
    return f"writes {written} characters for {piece[:40]!r}" if written > MAX_WRITTEN * len(piece) + 1 else None


def _encoding(tokenizer: Tokenizer, text: str) -> str | None:
    try:
        ids = call_tokenizer(tokenizer.encode, text).ids
        written = len(call_tokenizer(tokenizer.decode, ids))
    except TokenizerError:  # an error for a request with this text
        return None
    limit = MAX_WRITTEN * (len(text) + 1)
    if len(ids) > limit:
        return f"makes {len(ids)} tokens of {len(text)} characters"
    return f"writes {written} characters for {len(ids)} tokens" if written > limit else None


def _strings(document: Any) -> Iterator[str]:
    """Yield every string of a document except chat templates."""
    if isinstance(document, str):
        yield document
    for name, value in _entries(document):
        if name != "chat_template":
            yield from _strings(value)


def _strings_at(names: tuple[str, ...], document: Any) -> Iterator[str]:
    """Yield every string under one of `names`."""
    for name, value in _entries(document):
        if name in names and isinstance(value, str):
            yield value
        else:
            yield from _strings_at(names, value)


def _entries(document: Any) -> list[tuple[Any, Any]]:
    if isinstance(document, dict):
        return list(document.items())
    return list(enumerate(document)) if isinstance(document, list) else []
