"""What generation_config.json of a checkpoint means to a request that says nothing."""

from __future__ import annotations

from transformers import GenerationConfig

from builder.generation_config import bad_words, max_tokens, option_defaults


def test_a_checkpoint_that_says_nothing_is_greedy() -> None:
    assert option_defaults(GenerationConfig(), beams=4) == {"temperature": 0.0, "min_tokens": 0}
    assert max_tokens(GenerationConfig()) == max_tokens(GenerationConfig(), start=1) == 128


def test_a_search_is_no_wider_than_the_build() -> None:
    config = GenerationConfig(num_beams=5, length_penalty=2.0, early_stopping=True)
    searched = option_defaults(config, beams=8)
    assert (searched["num_beams"], searched["length_penalty"], searched["early_stopping"]) == (5, 2.0, "true")
    assert option_defaults(config, beams=3)["num_beams"] == 3
    assert not {"num_beams", "length_penalty", "early_stopping"} & set(option_defaults(config, beams=1))


def test_lengths_of_an_encoder_decoder_count_its_start() -> None:
    config = GenerationConfig(min_length=56, max_length=142)
    assert option_defaults(config, 4, start=1)["min_tokens"] == 55
    assert max_tokens(config, start=1) == 141
    assert option_defaults(config, 4)["min_tokens"] == 0, "of a decoder they count a prompt nobody knows"
    assert max_tokens(config) == 128
    assert option_defaults(GenerationConfig(min_new_tokens=7), 4)["min_tokens"] == 7


def test_sampling_with_its_own_filters() -> None:
    defaults = option_defaults(GenerationConfig(do_sample=True, top_p=0.9, temperature=0.7), beams=4)
    assert (defaults["temperature"], defaults["top_p"], defaults["top_k"]) == (0.7, 0.9, 50)


def test_words_that_never_come() -> None:
    config = GenerationConfig(bad_words_ids=[[58100], [3, 4]], suppress_tokens=[9])
    assert bad_words(config) == [[58100], [3, 4], [9]]
