"""generation_config.json of a checkpoint sets the defaults of requests."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GenerationConfig, PreTrainedModel

from builder.building.verify.generation import greedy_tokens
from builder.building.verify.seq2seq import cut
from builder.checkpoints.generation_config import (
    HARMLESS,
    IMPLEMENTED,
    REFUSED,
    end_ids,
    generation_file,
    known_token_rules,
    max_tokens,
    option_defaults,
    refuse_unserved,
    token_rules,
)
from builder.common.errors import CheckpointError
from builder.runtime.generation.beams import BeamSearch
from builder.runtime.generation.options import RequestOptions
from builder.runtime.generation.processors import make_rules
from builder.runtime.generation.sampling import Sampler, choose
from tests.decoders import make_decoder
from tests.seq2seqs import make_seq2seq
from tests.tiny_encoders import make_tokenizer


def test_checkpoint_without_settings_is_greedy() -> None:
    assert option_defaults(GenerationConfig(), beams=4) == {"temperature": 0.0, "min_tokens": 0}
    assert max_tokens(GenerationConfig()) == max_tokens(GenerationConfig(), start=1) == 128


def test_beam_search_is_limited_to_the_beams_of_the_build() -> None:
    config = GenerationConfig(num_beams=5, length_penalty=2.0, early_stopping=True)
    searched = option_defaults(config, beams=8)
    assert (searched["num_beams"], searched["length_penalty"], searched["early_stopping"]) == (5, 2.0, "true")
    assert option_defaults(config, beams=3)["num_beams"] == 3
    assert not {"num_beams", "length_penalty", "early_stopping"} & set(option_defaults(config, beams=1))
    greedy = option_defaults(GenerationConfig(length_penalty=2.0, early_stopping="never"), beams=5)
    assert (greedy["length_penalty"], greedy["early_stopping"]) == (2.0, "never"), "of a request that says num_beams"
    assert "num_beams" not in greedy


def test_encoder_decoder_lengths_include_the_start_token() -> None:
    config = GenerationConfig(min_length=56, max_length=142)
    assert option_defaults(config, 4, start=1)["min_tokens"] == 55
    assert max_tokens(config, start=1) == 141
    assert option_defaults(config, 4)["min_tokens"] == 0, "of a decoder they count a prompt nobody knows"
    assert max_tokens(config) == 142, "of a decoder the prompt is taken from it, request by request"
    assert option_defaults(GenerationConfig(min_new_tokens=7), 4)["min_tokens"] == 7


def test_max_new_tokens_precedes_max_length() -> None:
    """If a checkpoint sets both, as in transformers, which logs a warning."""
    model, source = make_seq2seq("bart"), torch.tensor([[5, 6, 7]])
    everything = [token for token in range(model.config.vocab_size) if token != 3]
    config = GenerationConfig(
        min_length=9, min_new_tokens=4, max_new_tokens=12, eos_token_id=3, pad_token_id=0, decoder_start_token_id=2,
        sequence_bias=[[[3], 1e4]], suppress_tokens=everything[40:],
    )  # fmt: skip
    model.generation_config = config
    (answer,) = model.generate(source, attention_mask=torch.ones_like(source))
    assert len(answer) == 1 + 4 + 1, "its start, as many tokens as it may end after, its end"
    assert option_defaults(config, 1, start=1)["min_tokens"] == 4
    refuse_unserved(config, is_decoder=True)


def test_sampling_with_its_own_filters() -> None:
    greedy = option_defaults(GenerationConfig(top_p=0.6, temperature=0.9), beams=4)
    assert greedy == {"temperature": 0.0, "min_tokens": 0, "top_p": 0.6}, "a request that samples has its top_p"
    defaults = option_defaults(GenerationConfig(do_sample=True, top_p=0.9, temperature=0.7), beams=4)
    assert (defaults["temperature"], defaults["top_p"], defaults["top_k"]) == (0.7, 0.9, 50)


@pytest.mark.parametrize(
    "values",
    [
        {"top_k": -1},
        {"top_p": 17.0},
        {"top_k": -1, "top_p": 0.5},
        {"top_p": "high"},
        {"epsilon_cutoff": -2.0},
        {"length_penalty": 1e9},
    ],
)
def test_greedy_checkpoint_may_have_any_sampling_settings(values: dict[str, Any]) -> None:
    """Regression: these checkpoints were refused, but transformers ignores the settings if do_sample is false."""
    config = GenerationConfig(do_sample=False)
    for name, value in values.items():
        setattr(config, name, value)
    refuse_unserved(config, is_decoder=True)
    sensible = {"top_p": 0.5} if values.get("top_p") == 0.5 else {}
    assert option_defaults(config, beams=4) == {"temperature": 0.0, "min_tokens": 0, **sensible}


def test_bad_words_never_occur() -> None:
    config = GenerationConfig(bad_words_ids=[[58100], [3, 4], [2], [2, 3]], suppress_tokens=[9])
    rules = token_rules(config, ends=[2])
    assert rules.bad_words == [[58100], [3, 4], [2, 3]], "an end token alone is none of them"
    assert rules.suppressed == [9]


def test_every_field_of_transformers_is_in_one_table() -> None:
    """Each field of transformers is implemented, listed as without effect, or refused."""
    fields = set(GenerationConfig().to_dict()) | set(GenerationConfig._get_default_generation_params())
    tables = [set(IMPLEMENTED), set(HARMLESS), set(REFUSED)]
    assert fields.difference(*tables) == set()
    assert all(not a & b for a, b in itertools.combinations(tables, 2))


def test_transformers_defaults_are_accepted() -> None:
    refuse_unserved(GenerationConfig(), is_decoder=True)
    refuse_unserved(GenerationConfig(**GenerationConfig._get_default_generation_params()), is_decoder=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"guidance_scale": 3.0}, "guidance_scale 3.0, which is not implemented"),
        ({"watermarking_config": {"greenlist_ratio": 0.5}}, "watermarking_config"),
        ({"penalty_alpha": 0.6, "top_k": 4}, "penalty_alpha 0.6"),
        ({"dola_layers": "high"}, "dola_layers 'high'"),
        ({"num_beam_groups": 2, "num_beams": 4}, "num_beam_groups 2"),
        ({"force_words_ids": [[4]]}, "force_words_ids"),
        ({"do_sample": True, "top_h": 0.4}, "top_h 0.4"),
        ({"do_sample": True, "num_beams": 3}, "num_beams 3"),
        ({"stop_strings": ["END"]}, r"stop_strings \['END'\].*; requests can send stop_words"),
        ({"max_time": 2.5}, "max_time 2.5.*; requests can send timeout_ms"),
        ({"token_healing": True}, "token_healing True"),
        ({"cache_implementation": "quantized"}, "cache_implementation 'quantized'"),
        ({"remove_invalid_values": True, "exponential_decay_length_penalty": (2, 1.5)}, "remove_invalid_values True"),
        ({"min_length": 8}, "min_length 8.*; min_new_tokens counts the answer alone"),
        ({"forced_bos_token_id": 8}, "forced_bos_token_id 8"),
    ],
)
def test_unimplemented_field_is_refused_with_its_value(options: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        refuse_unserved(GenerationConfig(**options), is_decoder=True)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"do_sample": True, "temperature": -3.0}, "temperature is -3.0; expected 0 to 100"),
        ({"do_sample": True, "temperature": "hot"}, "temperature is 'hot'; expected a number"),
        ({"do_sample": True, "top_p": 17.0}, "top_p is 17.0; expected 0 to 1"),
        ({"do_sample": True, "num_return_sequences": 10**9}, "n is 1000000000; expected 1 to 16"),
        ({"repetition_penalty": -1.0}, "repetition_penalty is -1.0; expected 0.01 to 100"),
        ({"no_repeat_ngram_size": -2}, "no_repeat_ngram_size is -2"),
        ({"suppress_tokens": ["x"]}, "makes no sense: invalid literal"),
        ({"exponential_decay_length_penalty": (3,)}, "makes no sense: "),
        ({"max_new_tokens": -7}, "max_new_tokens allows no token"),
        ({"do_sample": True, "temperature": 0.0}, "temperature 0"),
    ],
)
def test_absurd_generation_values_are_refused(values: dict[str, Any], message: str) -> None:
    config = GenerationConfig()
    for name, value in values.items():
        setattr(config, name, value)  # as a file may set it
    with pytest.raises(CheckpointError, match=message):
        refuse_unserved(config, is_decoder=True)


@pytest.mark.parametrize(
    ("own_file", "of_task", "file"),
    [
        (True, (), "^generation_config.json"),
        (False, (), "^config.json"),
        (True, ("max_time",), "^task_specific_params of config.json"),
    ],
)
def test_refusal_names_the_file_that_sets_the_field(
    own_file: bool, of_task: tuple[str, ...], file: str, tmp_path: Path
) -> None:
    """Regression: config.json was named for every `_from_model_config`, even in generation_config.json."""
    config = GenerationConfig(max_time=2.5, _from_model_config=True)
    if own_file:
        config.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=f"{file} says max_time 2.5"):
        refuse_unserved(config, False, of_task, generation_file(tmp_path))
    config.max_new_tokens = -7
    absurd = "^generation_config.json, or task_specific_params of config.json," if of_task else file
    with pytest.raises(CheckpointError, match=f"{absurd} has a value that makes no sense"):
        refuse_unserved(config, False, of_task, generation_file(tmp_path))


def test_encoder_decoder_accepts_min_length_and_forced_tokens() -> None:
    refuse_unserved(GenerationConfig(min_length=8, forced_bos_token_id=5, decoder_start_token_id=2), is_decoder=False)
    with pytest.raises(CheckpointError, match=r"decoder_start_token_id \[2, 3\]"):
        refuse_unserved(GenerationConfig(decoder_start_token_id=[2, 3]), is_decoder=False)


def test_num_return_sequences_is_the_default_of_n() -> None:
    assert option_defaults(GenerationConfig(do_sample=True, num_return_sequences=3), 4)["n"] == 3
    assert option_defaults(GenerationConfig(num_beams=4, num_return_sequences=3), 2)["n"] == 2


VOCABULARY = 40
FIELDS: list[dict[str, Any]] = [
    {"suppress_tokens": [1, 7, 8], "begin_suppress_tokens": [3, 4, 5, 6]},
    {"suppress_tokens": [-1, 7, 40], "begin_suppress_tokens": [-2, 4, 41], "min_new_tokens": 5},
    {"encoder_repetition_penalty": 1.6},
    {"encoder_repetition_penalty": 0.5, "repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
    {"encoder_no_repeat_ngram_size": 2},
    {"exponential_decay_length_penalty": (3, 1.4)},
    {"exponential_decay_length_penalty": (2, 0.5), "min_new_tokens": 4, "suppress_tokens": [3]},
    {"sequence_bias": {(5,): -4.0, (6, 7): 9.0, (11, 12, 13): 20.0, (9,): 2.5}},
    {"sequence_bias": [[[5], -4.0], [[6, 7], 9.0]], "bad_words_ids": [[2], [8], [9, 10], [2, 3]]},
    {"forced_eos_token_id": [2, 3], "suppress_tokens": [3], "begin_suppress_tokens": [9]},
    {"renormalize_logits": True, "remove_invalid_values": True, "repetition_penalty": 1.2},
]


@pytest.fixture(scope="module", params=["gpt2", "bart"])
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return make_decoder("gpt2") if request.param == "gpt2" else make_seq2seq("bart")


@pytest.mark.parametrize("fields", FIELDS, ids=lambda fields: "+".join(fields))
def test_scores_and_tokens_are_those_of_transformers_processors(model: PreTrainedModel, fields: dict[str, Any]) -> None:
    """Compare with all logits processors that `generate` creates, over random scores, token by token."""
    generator = np.random.default_rng(3)
    is_decoder, count, stated = not model.config.is_encoder_decoder, 14, [2, 3, -1, VOCABULARY]
    read = generator.integers(0, VOCABULARY, 9).tolist()
    prompt = read if is_decoder else [1]
    config = GenerationConfig(**fields, eos_token_id=stated, max_length=len(prompt) + count)
    config._eos_token_tensor = torch.tensor([2, 3] if config.exponential_decay_length_penalty else stated)
    refuse_unserved(config, is_decoder)
    ends = end_ids(config, make_tokenizer("bpe", type_ids=False), VOCABULARY)
    theirs = model._get_logits_processor(config, len(prompt), torch.tensor([read]), device="cpu", model_kwargs={})
    options = RequestOptions(**option_defaults(config, 1, None if is_decoder else 1))
    always = known_token_rules(config, ends, VOCABULARY)
    rules = make_rules(always, options, tuple(ends), source=tuple(read), max_tokens=count)
    sampler = Sampler(rules, prompt=prompt)
    for _ in range(count):
        logits = generator.normal(0, 3, VOCABULARY).astype(np.float32)
        ids = torch.tensor([[*prompt, *sampler.generated]])
        wanted = theirs(ids, torch.tensor(logits)[None])[0]
        scores = logits.copy()
        if not rules.is_idle(len(sampler.generated)):
            rules.apply(scores, prompt, sampler.generated)
        if not config.renormalize_logits:
            np.testing.assert_allclose(scores, wanted.numpy(), rtol=1e-5)
        (choice,) = choose(logits[None], [sampler])
        assert choice.token == int(wanted.argmax())
        sampler.generated.append(choice.token)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"bad_words_ids": [[3], [4, 40]]}, "names token 40 in bad_words_ids; the model has 0 to 39"),
        ({"sequence_bias": [[[41], 2.0]]}, "names token 41 in sequence_bias"),
        ({"forced_eos_token_id": 40}, "names token 40 in forced_eos_token_id"),
    ],
)
def test_tokens_outside_the_vocabulary_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        known_token_rules(GenerationConfig(**fields), [2], VOCABULARY)


@pytest.mark.parametrize(
    ("fields", "ends"),
    [
        ({"renormalize_logits": True, "suppress_tokens": list(range(20, 400))}, (3,)),
        ({"suppress_tokens": list(range(20, 400)), "sequence_bias": [[[500, 501], 6.0], [[7], 3.0]]}, (3,)),
        ({"exponential_decay_length_penalty": (2, 1.05), "encoder_repetition_penalty": 1.5}, (3,)),
        ({"exponential_decay_length_penalty": (2, 1.05)}, (174, 283, 311, 379, 587)),
        ({"exponential_decay_length_penalty": (0, 1.2), "early_stopping": "never"}, (3, 40)),
        ({"exponential_decay_length_penalty": (2, 1.5), "early_stopping": True}, (223, 227, 272, 396, 567)),
    ],
    ids=str,
)
def test_searches_are_those_of_generate(fields: dict[str, Any], ends: tuple[int, ...]) -> None:
    """Compare the n best answers under the checkpoint's settings, token by token, with PyTorch's logits on both sides.

    With padding 0, transformers writes the first end token after the one that ended an answer: `cut` leaves that out.
    """
    model, prompt, count = make_decoder("gpt2"), [5, 6, 7], 10
    config = GenerationConfig(
        **fields, num_beams=4, num_return_sequences=3, eos_token_id=list(ends), pad_token_id=0, max_new_tokens=count
    )
    options = RequestOptions(**option_defaults(config, 8))
    rules = make_rules(token_rules(config, list(ends)), options, ends, source=tuple(prompt), max_tokens=count)
    search = BeamSearch(rules, prompt, frozenset(ends))
    with torch.no_grad():
        while not search.is_done:
            rows = torch.tensor([[*prompt, *tokens] for tokens in search.generated])
            search.step(list(model(input_ids=rows, use_cache=False).logits[:, -1].numpy()))
        ids = torch.tensor([prompt])
        model.generation_config = config
        wanted = model.generate(
            ids, attention_mask=torch.ones_like(ids), return_dict_in_generate=True, output_scores=True
        )
    expected = [cut(row[len(prompt) :].tolist(), ends, count) for row in wanted.sequences]
    scores = [hypothesis.score for hypothesis in search.ended[: rules.options.n]]
    np.testing.assert_allclose(scores, wanted.sequences_scores.numpy(), rtol=1e-4)
    assert [hypothesis.tokens for hypothesis in search.ended[: rules.options.n]] == expected


def test_reference_ignores_the_checkpoints_generation_settings() -> None:
    """Graphs are verified without the checkpoint's settings, which generate would refuse or apply."""
    model = make_decoder("gpt2")
    plain = greedy_tokens(model, [5, 6, 7], 8)
    model.generation_config.update(num_beams=3, num_return_sequences=2, exponential_decay_length_penalty=(2, 1.5))
    model.generation_config.update(sequence_bias=[[[plain[0]], -50.0]], no_repeat_ngram_size=1)
    assert greedy_tokens(model, [5, 6, 7], 8) == plain
    assert model.generation_config.num_beams == 3
