"""A checkpoint's generation_config.json as the emitted loop reads it: the defaults of requests.

Every field of transformers' GenerationConfig is in exactly one of three tables: implemented as transformers' own
processors do, without effect here (and why), or refused by name when it is set.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import GenerationConfig, PreTrainedTokenizerFast

from builder.common.errors import CheckpointError
from builder.runtime.contract import Decay, TokenBias, TokenRules
from builder.runtime.generation.checking import read_options
from builder.runtime.generation.options import RANGES

FILE = "generation_config.json"
TASK_FILE = "task_specific_params of config.json"
LARGEST_SEARCH = int(RANGES["num_beams"][1])
MAX_TOKENS = 128  # of an answer, if neither the request nor the checkpoint gives a number
SAME_NAME = (
    "repetition_penalty",
    "encoder_repetition_penalty",
    "no_repeat_ngram_size",
    "encoder_no_repeat_ngram_size",
    "renormalize_logits",
)
SAMPLING = ("top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff")
SEARCH = ("num_beams", "length_penalty", "early_stopping")
IMPLEMENTED = frozenset({
    *SAME_NAME, *SAMPLING, *SEARCH, "do_sample", "temperature", "num_return_sequences", "max_length",
    "max_new_tokens", "min_length", "min_new_tokens", "eos_token_id", "decoder_start_token_id", "forced_bos_token_id",
    "forced_eos_token_id", "bad_words_ids", "suppress_tokens", "begin_suppress_tokens", "sequence_bias",
    "exponential_decay_length_penalty",
})  # fmt: skip
HARMLESS: Mapping[str, str] = {
    **dict.fromkeys(
        ("use_cache", "cache_config", "max_cache_len", "prefill_chunk_size", "low_memory"),
        "how generate keeps its cache; the cache here is --cache",
    ),
    **dict.fromkeys(
        ("output_attentions", "output_hidden_states", "output_scores", "output_logits", "return_dict_in_generate"),
        "what generate returns beside tokens",
    ),
    **dict.fromkeys(
        (
            "is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold",
            "assistant_early_exit", "assistant_lookbehind", "target_lookbehind", "prompt_lookup_num_tokens",
            "max_matching_ngram_size", "speculation_type", "use_mtp",
        ),
        "drafts make generate faster and leave its answers as they are",
    ),
    **dict.fromkeys(("compile_config", "disable_compile"), "how generate is compiled"),
    "continuous_batching_config": "how generate batches; the emitted loop has slots",
    "pad_token_id": "nothing is padded here",
    "bos_token_id": "the tokenizer puts it before a prompt; an encoder-decoder without a start token starts with it",
    "remove_invalid_values": "a build refuses NaN, and a forbidden token is as improbable as the least number",
    "diversity_penalty": "of group beam search, which num_beam_groups asks for",
    **dict.fromkeys(
        ("transformers_version", "_from_model_config", "_commit_hash", "_original_object_hash"),
        "says where the file comes from",
    ),
}  # fmt: skip
# Fields that are refused, with the values that change nothing and are accepted.
_OFF: tuple[Any, ...] = (None, False, 0)
REFUSED: Mapping[str, tuple[Any, ...]] = {
    "guidance_scale": (*_OFF, 1),
    **dict.fromkeys(
        ("watermarking_config", "token_healing", "stop_strings", "max_time", "penalty_alpha", "dola_layers"), _OFF
    ),
    "num_beam_groups": (*_OFF, 1),
    **dict.fromkeys(("constraints", "force_words_ids", "assistant_ensemble_weight", "top_h"), _OFF),
    "cache_implementation": (None, "dynamic", "static", "hybrid", "offloaded", "offloaded_static", "paged"),
}
INSTEAD: Mapping[str, str] = {
    "stop_strings": "requests can send stop_words",
    "max_time": "requests can send timeout_ms",
    "min_length": "min_new_tokens counts the answer alone",
}


def generation_file(folder: Path) -> str:
    """Return the name of the file in `folder` with the generation settings: config.json in old checkpoints.

    The field `_from_model_config` does not tell: transformers copies it into the generation_config.json that it saves.
    """
    return FILE if (folder / FILE).is_file() else "config.json"


def refuse_unserved(
    config: GenerationConfig, is_decoder: bool, of_task: Collection[str] = (), file: str = FILE
) -> None:
    """Raise CheckpointError for a field that is not implemented and would change answers, or has an absurd value.

    `of_task`: the fields that task_specific_params sets; `file`: the one that sets the others.
    """
    _refuse_absurd(config, f"{file}, or {TASK_FILE}," if of_task else file)
    values = {name: value for name, value in config.to_dict().items() if value is not None}
    unknown = [name for name in values if name not in IMPLEMENTED and name not in HARMLESS and name not in REFUSED]
    # transformers ignores a checkpoint's own fields, which its own code would read
    known = [name for name in unknown if name in GenerationConfig().to_dict()]
    wrong = [name for name, off in REFUSED.items() if name in values and values[name] not in off]
    if not config.do_sample:
        wrong = [name for name in wrong if name != "top_h"]  # of sampling
    wrong += known + [name for name, test in _COMBINATIONS.items() if test(config, is_decoder)]
    if wrong:
        name = wrong[0]
        instead = f"; {INSTEAD[name]}" if name in INSTEAD else ""
        raise CheckpointError(
            f"{TASK_FILE if name in of_task else file} says {name} {values[name]!r}, which is not implemented and "
            f"would change answers{instead}. Remove it there to serve the model without it"
        )


def _refuse_absurd(config: GenerationConfig, file: str) -> None:
    """Raise CheckpointError for values with which no request could be answered."""
    try:
        defaults = option_defaults(config, beams=LARGEST_SEARCH)
        for name, value in defaults.items():
            if name != "early_stopping" and not isinstance(value, int | float):
                raise ValueError(f"{name} is {value!r}; expected a number")
        read_options({}, {"text_input": "x"}, defaults, ["text_input", *defaults])
        token_rules(config, [])
        if max_tokens(config) < 1 or (total_length(config) or 1) < 1:
            raise ValueError("max_new_tokens allows no token")
        if config.do_sample and config.temperature == 0:  # transformers' generate refuses that as well
            raise ValueError("do_sample asks to sample, at temperature 0; for greedy answers set do_sample to false")
    except (TypeError, ValueError, OverflowError, IndexError) as error:
        raise CheckpointError(
            f"{file} has a value that makes no sense: {error}. Correct it there, or remove it"
        ) from error


_COMBINATIONS: Mapping[str, Callable[[GenerationConfig, bool], bool]] = {
    "num_beams": lambda config, is_decoder: bool(config.do_sample) and (config.num_beams or 1) > 1,  # beams that sample
    "min_length": lambda config, is_decoder: (  # counts a prompt that is unknown here; use min_new_tokens instead
        is_decoder and bool(config.min_length) and config.min_new_tokens is None
    ),
    "forced_bos_token_id": lambda config, is_decoder: is_decoder and config.forced_bos_token_id is not None,
    "decoder_start_token_id": lambda config, is_decoder: isinstance(config.decoder_start_token_id, list),
    "remove_invalid_values": lambda config, is_decoder: (  # makes a forbidden end's -inf a number, which grows
        bool(config.remove_invalid_values) and config.exponential_decay_length_penalty is not None
    ),
}


def option_defaults(config: GenerationConfig, beams: int, start: int | None = None) -> dict[str, Any]:
    """Return options that a request leaves out; greedy unless the checkpoint samples or searches.

    If a checkpoint is greedy, its filters, such as top_p, still apply to sampled requests, and its end of a search to
    searching requests, if they are valid. Its temperature does not: such a request samples at 1.0, as the table of
    options says.
    `beams`: the most that were built for; `start`: of an encoder-decoder, the tokens its decoder starts with, which
    transformers counts in min_length. (A decoder's min_length counts a prompt that is unknown here.)
    """
    defaults: dict[str, Any] = {name: getattr(config, name, None) for name in (*SAME_NAME, *SAMPLING)}
    defaults["temperature"] = 0.0
    shortest = (config.min_length or 0) - start if start is not None else 0
    defaults["min_tokens"] = max(shortest, 0) if config.min_new_tokens is None else config.min_new_tokens
    if config.do_sample:
        defaults["temperature"] = config.temperature if config.temperature is not None else 1.0
        defaults["n"] = config.num_return_sequences
        if defaults["top_k"] is None:
            defaults["top_k"] = 50  # transformers' own default for sampling
    else:
        defaults |= {name: None for name in SAMPLING if not _is_valid(name, defaults[name])}
    searches = not config.do_sample and min(config.num_beams or 1, beams) > 1
    if beams > 1:
        stopping, penalty = config.early_stopping, config.length_penalty
        if searches or _is_valid("length_penalty", penalty):
            defaults["length_penalty"] = penalty
        if stopping is True or stopping == "never":  # transformers compares it with these alone
            defaults["early_stopping"] = "true" if stopping is True else "never"
    if searches:
        defaults["num_beams"] = min(config.num_beams, beams)
        if config.num_return_sequences is not None:
            defaults["n"] = min(config.num_return_sequences, defaults["num_beams"])
    return {name: value for name, value in defaults.items() if value is not None}


def _is_valid(name: str, value: Any) -> bool:
    """Return True if a request could have this value, which transformers ignores in a greedy checkpoint."""
    low, high = RANGES.get(name, (0.0, 1.0))
    return isinstance(value, int | float) and low <= value <= high


def known_token_rules(config: GenerationConfig, ends: list[int], vocabulary: int, file: str = FILE) -> TokenRules:
    """Return `token_rules` of a model with `vocabulary` tokens, without suppressed tokens outside the vocabulary.

    Raises CheckpointError if another field of `file` names such a token: transformers' generate fails on it.
    """
    rules = token_rules(config, ends)
    named = {
        "bad_words_ids": [token for word in rules.bad_words for token in word],
        "sequence_bias": [token for entry in rules.sequence_bias for token in entry.tokens],
        "forced_eos_token_id": rules.last,
    }
    for name, tokens in named.items():
        strange = [token for token in tokens if not 0 <= token < vocabulary]
        if strange:
            raise CheckpointError(
                f"{file} names token {strange[0]} in {name}; the model has 0 to {vocabulary - 1}. "
                "Correct it there, or remove it"
            )
    return replace(
        rules,
        suppressed=[token for token in rules.suppressed if 0 <= token < vocabulary],
        begin_suppressed=[token for token in rules.begin_suppressed if 0 <= token < vocabulary],
    )


def token_rules(config: GenerationConfig, ends: list[int]) -> TokenRules:
    """Return the tokens that are forced, forbidden, or made more or less likely in every answer."""
    decay = config.exponential_decay_length_penalty
    words = [list(map(int, word)) for word in config.bad_words_ids or []]
    biases = config.sequence_bias or []
    pairs = biases.items() if isinstance(biases, dict) else biases
    return TokenRules(
        bad_words=[word for word in words if word not in [[end] for end in ends]],  # as in transformers
        sequence_bias=[TokenBias(list(map(int, tokens)), float(bias)) for tokens, bias in pairs],
        suppressed=token_list(config.suppress_tokens),
        begin_suppressed=token_list(config.begin_suppress_tokens),
        decay=Decay(int(decay[0]), float(decay[1])) if decay is not None else None,
        last=token_list(config.forced_eos_token_id),
    )


def end_ids(config: GenerationConfig, tokenizer: PreTrainedTokenizerFast, vocabulary: int) -> list[int]:
    """Return every token that ends an answer, without ids outside the `vocabulary` of the model, such as -1."""
    ends = config.eos_token_id if config.eos_token_id is not None else tokenizer.eos_token_id
    return [token for token in token_list(ends) if 0 <= token < vocabulary]


def max_tokens(config: GenerationConfig, start: int | None = None) -> int:
    """Return the new tokens of an answer if its request gives no number. `start`: as for `option_defaults`."""
    if config.max_new_tokens:
        return int(config.max_new_tokens)
    if config.max_length:  # for a decoder, `total_length` accounts for the prompt
        return int(config.max_length) - (start or 0)
    return MAX_TOKENS


def total_length(config: GenerationConfig) -> int | None:
    """Return the tokens of a decoder's prompt and answer together, if a request gives no length."""
    return int(config.max_length) if config.max_length and not config.max_new_tokens else None


def token_list(tokens: Any) -> list[int]:
    """Return one token id, several, or none, as a sorted list."""
    return sorted({int(token) for token in (tokens if isinstance(tokens, list) else [tokens]) if token is not None})
