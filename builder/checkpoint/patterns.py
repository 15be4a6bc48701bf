"""Regular expressions of a tokenizer.json that take for ever: found by trying, in a process that can be ended.

The tokenizers library searches with backtracking, by Oniguruma, which gives up on one match after 10 million steps, a
third of a second, but not on a search: a*a*b takes as long from each letter of a text on. What an expression takes
cannot be read off it, so texts that each of its letters makes are tried.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from transformers import PreTrainedTokenizerFast

from builder.errors import CheckpointError

LENGTH = 4096  # characters of a text that is tried
SECONDS = 10  # of a processor, for all texts; what the expressions of known models take is far below
PATIENCE_S = 600.0  # on a machine that is busy with other things
SPARE = "\x01"  # what no expression expects; after it, all letters: one whose end is nowhere is not tried at all
COMMON = "a1 \n.'-_A0é中"
PROGRAM = """
import json, resource, sys
seconds, (_, most) = int(sys.argv[1]), resource.getrlimit(resource.RLIMIT_CPU)
if most == resource.RLIM_INFINITY or seconds < most:  # else it is ended as all that this user runs
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, most))
from tokenizers import Tokenizer
asked = json.load(sys.stdin)
tokenizer = Tokenizer.from_str(asked["tokenizer"])
for text in asked["texts"]:
    try:
        tokenizer.encode(text)
    except BaseException as error:
        if type(error).__name__ not in ("PanicException", "Exception"):
            raise
"""


def refuse_endless_patterns(tokenizer: PreTrainedTokenizerFast, model: str) -> None:
    """Raises CheckpointError for a tokeniser whose expressions take more than SECONDS on texts of LENGTH letters."""
    document = tokenizer.backend_tokenizer.to_str()
    patterns = sorted(set(_patterns(json.loads(document))))
    if not patterns:
        return
    letters = sorted({letter for pattern in patterns for letter in pattern if letter.isalnum()} | set(COMMON))
    end = SPARE + "".join(letters)
    texts = [letter * LENGTH + end for letter in letters] + ["".join(letters) * (LENGTH // len(letters)) + end]
    request = json.dumps({"tokenizer": document, "texts": texts})
    if not _ends(request):
        raise CheckpointError(
            f"the tokenizer of {model} does not finish on {len(texts)} texts of {LENGTH} characters: one of "
            f"its expressions backtracks ({'; '.join(patterns)[:200]}). It could block a server for ever; use "
            "another one"
        )


def _ends(request: str) -> bool:
    """Whether PROGRAM does what is asked before the system ends it for its time: SIGKILL may be for its memory."""
    command = [sys.executable, "-I", "-c", PROGRAM, str(SECONDS)]
    try:
        done = subprocess.run(command, input=request, text=True, capture_output=True, timeout=PATIENCE_S, check=False)
    except subprocess.TimeoutExpired:
        return False
    return done.returncode != -signal.SIGXCPU


def _patterns(document: Any) -> Iterator[str]:
    """Every {"Regex": ...} of a tokenizer.json; those that the library itself carries are known."""
    if isinstance(document, dict):
        if isinstance(document.get("Regex"), str):
            yield document["Regex"]
        for name, value in document.items():
            if name != "model":  # the vocabulary
                yield from _patterns(value)
    elif isinstance(document, list):
        for value in document:
            yield from _patterns(value)
