"""A checkpoint's generation_config.json as the emitted loop reads it: what holds where a request does not say.

Knows transformers' names for options; knows no architecture and no task.
"""

from __future__ import annotations

from typing import Any

from transformers import GenerationConfig, PreTrainedTokenizerFast

MAX_TOKENS = 128  # of an answer whose request does not say, where the checkpoint does not either
SAME_NAME = ("repetition_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size")
SAMPLING = ("top_k", "top_p", "min_p", "typical_p")


def option_defaults(config: GenerationConfig, beams: int, start: int | None = None) -> dict[str, Any]:
    """Options that a request leaves out; greedy unless the checkpoint samples or searches.

    `beams`: the most that were built for; `start`: of an encoder-decoder, the tokens its decoder starts with, which
    transformers counts in min_length. (A decoder's min_length counts a prompt that nobody knows here.)
    """
    defaults: dict[str, Any] = {name: getattr(config, name, None) for name in SAME_NAME}
    defaults["temperature"] = 0.0
    shortest = (config.min_length or 0) - start if start is not None else 0
    defaults["min_tokens"] = max(shortest, config.min_new_tokens or 0)
    if config.do_sample:
        defaults.update({name: getattr(config, name, None) for name in SAMPLING})
        defaults["temperature"] = config.temperature if config.temperature is not None else 1.0
        if defaults["top_k"] is None:
            defaults["top_k"] = 50  # transformers' own default for sampling
    elif min(config.num_beams or 1, beams) > 1:
        defaults["num_beams"] = min(config.num_beams, beams)
        defaults["length_penalty"] = config.length_penalty
        defaults["early_stopping"] = str(config.early_stopping or False).lower()
    return {name: value for name, value in defaults.items() if value is not None}


def end_ids(config: GenerationConfig, tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """Every token that ends an answer."""
    ends = config.eos_token_id if config.eos_token_id is not None else tokenizer.eos_token_id
    return token_list(ends)


def max_tokens(config: GenerationConfig, start: int | None = None) -> int:
    """New tokens of an answer whose request does not say. `start`: as for `option_defaults`."""
    if config.max_new_tokens:
        return int(config.max_new_tokens)
    if start is not None and config.max_length:
        return int(config.max_length) - start
    return MAX_TOKENS


def bad_words(config: GenerationConfig) -> list[list[int]]:
    """Runs of tokens that are never completed."""
    words = [list(map(int, word)) for word in config.bad_words_ids or []]
    return words + [[token] for token in token_list(config.suppress_tokens)]


def token_list(tokens: Any) -> list[int]:
    """One token id, several, or none, as a sorted list."""
    return sorted({int(token) for token in (tokens if isinstance(tokens, list) else [tokens]) if token is not None})
