"""Tokenizer of a checkpoint: loaded once its files are known to be harmless, compared, and written as one file."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerFast

from builder.checkpoints.slow_tokenizers import as_fast
from builder.checkpoints.text_part import text_config
from builder.checkpoints.tokenizer_limits import refuse_hostile_files, refuse_hostile_tokenizer
from builder.common.errors import CheckpointError, first_line
from builder.common.samples import TEXTS
from builder.runtime.contract import Language
from builder.runtime.generation.text import Detokenizer
from builder.runtime.panics import call_tokenizer

FORCED = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
DECODED_TEXTS = (
    *TEXTS[:8],
    "Ça va ? Oui , c ' est vrai ! We ' re n't 's .",
    "  two  spaces ",
    "日本語 😀",
    "a\tb\nc",
    "",
)
SPLITTING_PARTS = ("normalizer", "pre_tokenizer", "model")  # of tokenizer.json: they decide where a text is cut
LANGUAGE_CODE = re.compile(r"[a-z]{2,3}_[A-Za-z]{2,4}")  # en_XX, eng_Latn
MAX_VOCABULARY = 1 << 24  # tokens, for a model that does not state its embeddings; known vocabularies have a million


def load_any(folder: Path) -> Any:
    """Return the tokenizer in `folder` by transformers' auto class."""
    return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)


def load_tokenizer(
    folder: Path, model: str, config: PreTrainedConfig, load: Callable[[Path], Any] = load_any
) -> PreTrainedTokenizerFast:
    """Return the tokenizer in `folder`. Raises CheckpointError, which names `model`.

    `load`: loads the tokenizer of a folder. A slow one is converted. Refuses a tokenizer that could block a server, and
    one with more tokens than the model has.
    """
    names = ("tokenizer.json", "vocab.txt", "vocab.json", "spiece.model", "sentencepiece.bpe.model", "spm.model")
    if not any((folder / name).is_file() for name in names):
        raise CheckpointError(f"{model} has no tokenizer: none of {', '.join(names)} is in {folder}; add it there")
    refuse_hostile_files(folder, model)
    try:
        tokenizer = call_tokenizer(load, folder)
    except Exception as error:  # tokenizers raises errors of any type for a broken file
        raise CheckpointError(f"the tokenizer of {model} does not load: {first_line(error)}") from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        try:
            tokenizer = as_fast(tokenizer)
        except CheckpointError as error:
            raise CheckpointError(f"{model}: {error}") from error
    if tokenizer.split_special_tokens:
        raise CheckpointError(
            f"the tokenizer of {model} says split_special_tokens: special tokens in a text would be text, which is not "
            "supported; set it to false in tokenizer_config.json to serve the model without"
        )
    # Before the tokenizer is written as JSON, for which the library lists every id without a token.
    _refuse_tokens([len(tokenizer) - 1, *tokenizer.get_vocab().values()], config, model)
    refuse_hostile_tokenizer(tokenizer, folder, model)
    backend = tokenizer.backend_tokenizer
    backend.no_padding()  # to a length that happened to be set
    backend.no_truncation()
    _refuse_tokens(call_tokenizer(backend.encode, "a", "b").ids, config, model)  # with those around texts
    typed: PreTrainedTokenizerFast = tokenizer
    return typed


def _refuse_tokens(tokens: Sequence[int], config: PreTrainedConfig, model: str) -> None:
    """Raise CheckpointError for a token id that the model has no embedding for, or that no model has."""
    rows = getattr(text_config(config) or config, "vocab_size", None)
    highest = max(tokens, default=0)
    if rows is not None and highest >= rows:
        raise CheckpointError(
            f"the tokenizer of {model} has tokens up to {highest} and the model only {rows} embeddings: "
            "they do not belong together"
        )
    if highest >= MAX_VOCABULARY:
        raise CheckpointError(
            f"the tokenizer of {model} has tokens up to {highest}; expected at most {MAX_VOCABULARY - 1}: "
            "use another one"
        )


def tokenizer_json(tokenizer: PreTrainedTokenizerFast) -> str:
    """Return the tokenizer as one file, without the padding and truncation that happened to be set on it."""
    document = json.loads(tokenizer.backend_tokenizer.to_str())
    document["padding"] = document["truncation"] = None
    return json.dumps(document, ensure_ascii=False, separators=(",", ":"))


def vocabulary_difference(own: PreTrainedTokenizerFast, other: PreTrainedTokenizerFast) -> str | None:
    """Return how the tokenizer `own` differs from `other`, in words; None if it does not."""
    ids, others = own.get_vocab(), other.get_vocab()
    strange = min(ids.items() ^ others.items(), key=lambda entry: (entry[1], entry[0]), default=None)
    if strange is not None:
        token = strange[0]
        return f"the id of {token!r} is {ids.get(token)}, not {others.get(token)} (of {len(ids)} and {len(others)})"
    documents = [json.loads(one.backend_tokenizer.to_str()) for one in (own, other)]
    part = next((part for part in SPLITTING_PARTS if documents[0][part] != documents[1][part]), None)
    return None if part is None else f"its tokenizer.json has another {part}"


def cleans_up(tokenizer: PreTrainedTokenizerFast) -> bool:
    """Return True if transformers removes spaces before punctuation as it decodes; for BPE only if it is forced to."""
    pieces = type(tokenizer.backend_tokenizer.model).__name__ != "BPE"
    return bool(tokenizer.clean_up_tokenization_spaces) and (pieces or bool(getattr(tokenizer, FORCED, False)))


def refuse_other_text(tokenizer: PreTrainedTokenizerFast) -> None:
    """Raise CheckpointError if the emitted code decodes tokens to another text than transformers."""
    for probe in DECODED_TEXTS:
        tokens = tokenizer(probe)["input_ids"]
        detokenizer = Detokenizer(tokenizer.backend_tokenizer, [], clean_up=cleans_up(tokenizer))
        text = "".join(map(detokenizer.push, tokens)) + detokenizer.flush()
        expected = tokenizer.decode(tokens, skip_special_tokens=True)
        if text != expected:
            pairs = enumerate(zip(text, expected, strict=False))
            position = next((at for at, (a, b) in pairs if a != b), min(len(text), len(expected)))
            ours, theirs = (whole[max(0, position - 20) : position + 40] for whole in (text, expected))
            raise CheckpointError(
                f"tokens of this checkpoint are written {ours!r} here and {theirs!r} by transformers: a bug worth "
                f"reporting, with its tokenizer class, {type(tokenizer).__name__}. A decoder can be served with "
                "--engine vllm, which writes text itself"
            )


def truncating(tokenizer: PreTrainedTokenizerFast, max_length: int) -> PreTrainedTokenizerFast:
    """Return a copy of `tokenizer` that cuts texts at `max_length` tokens unless a call says otherwise."""
    kind: Any = type(tokenizer)

    class Truncating(kind):  # type: ignore[misc]
        def __call__(self, *texts: Any, **options: Any) -> Any:
            return super().__call__(*texts, **{"truncation": True, "max_length": max_length, **options})

    own: Any = copy.copy(tokenizer)
    own.__class__, own.model_max_length = Truncating, max_length
    return own


def languages(tokenizer: PreTrainedTokenizerFast) -> dict[str, Language]:
    """Return, by code, the tokens that tell a model a language.

    Empty for a tokenizer whose texts need no language.
    """
    if not hasattr(tokenizer, "src_lang"):
        return {}
    own = tokenizer.src_lang
    by_code = {}
    try:
        for code in filter(LANGUAGE_CODE.fullmatch, sorted(tokenizer.get_vocab())):
            token = tokenizer.convert_tokens_to_ids(code)
            if token not in tokenizer.all_special_ids:
                continue
            tokenizer.src_lang = code
            before, after = list(tokenizer.prefix_tokens), list(tokenizer.suffix_tokens)
            by_code[code] = Language(before, after, token)
    finally:
        tokenizer.src_lang = own
    return by_code


def nearest_language(code: str | None, known: Mapping[str, Language]) -> str | None:
    """Return the one known code that `code` means, or None: "en" is en_XX if there is no other English."""
    if code is None or code in known:
        return code
    candidates = [name for name in known if name.split("_")[0] == code]
    return candidates[0] if len(candidates) == 1 else None
