"""A checkpoint's settings for texts and answers, as in transformers: prefixes, forced tokens, lengths, beams."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import MBartTokenizer, PreTrainedConfig

from builder.building.families import begin
from builder.building.families.seq2seq.settings import Settings, read_settings, source_of, verified_beginning
from builder.checkpoints.checkpoint import Checkpoint
from builder.checkpoints.resolve import resolve
from builder.checkpoints.tasks.translation import TASK as TRANSLATION
from builder.checkpoints.tokenizer import tokenizer_json
from builder.common.errors import BuilderError, SpecError
from builder.options import make_spec
from builder.runtime.fields import InputError
from builder.runtime.generation.options import RequestOptions
from builder.runtime.generation.source_texts import SourceTexts
from tests.decoders import make_decoder_checkpoint
from tests.seq2seqs import make_seq2seq_checkpoint

TEXT = "The train leaves."


def _read(folder: Path, task: str | None = None) -> tuple[Checkpoint, Settings, SourceTexts]:
    """Return the checkpoint, its settings, and the emitted code that reads its texts."""
    checkpoint = resolve(make_spec(model=str(folder), name="m", task=task, max_length=64))
    settings = read_settings(checkpoint, task, slots=4, asked_beams=None, max_answer=None)
    source = source_of(checkpoint, settings, [], token_budget=64)
    return checkpoint, settings, SourceTexts(source, Tokenizer.from_str(tokenizer_json(checkpoint.tokenizer)))


@pytest.mark.parametrize(
    ("task", "own", "expected"),
    [
        (None, {}, " "),
        ("summarization", {}, " "),
        ("summarization", {"summarization": {"prefix": "summarize: "}}, "summarize: "),
    ],
)
def test_prefix_of_the_configuration_precedes_every_text(
    task: str | None, own: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    """Regression: BART's summarisers set the prefix " ", without which the first word was another token."""
    folder = make_seq2seq_checkpoint(tmp_path / "bart", "bart", prefix=" ", task_specific_params=own)
    checkpoint, _, texts = _read(folder, task)
    wanted = checkpoint.tokenizer(expected + TEXT)["input_ids"]
    assert wanted != checkpoint.tokenizer(TEXT)["input_ids"]
    assert list(texts(RequestOptions(prompt=TEXT)).source) == wanted


def test_text_with_a_language_gets_no_prefix(tmp_path: Path) -> None:
    folder = make_seq2seq_checkpoint(tmp_path / "mbart", "mbart", multilingual=True, pad_token_id=1, prefix=" a ")
    checkpoint, _, texts = _read(folder, "translation_en_to_ro")
    assert list(texts(RequestOptions(prompt="the train")).source) == checkpoint.tokenizer("the train")["input_ids"]


def _of_25_languages() -> MBartTokenizer:
    pieces = [(piece, 0.0) for piece in ("<s>", "<pad>", "</s>", "<unk>")]
    pieces += [(f"▁{word}", -2.0) for word in ("the", "train")] + [(letter, -8.0) for letter in "abcdehintr"]
    return MBartTokenizer(vocab=pieces, src_lang="en_XX", model_max_length=64)


def test_answer_that_starts_with_its_language_is_not_forced_to_repeat_it(tmp_path: Path) -> None:
    """For mBART-25, `generate` gets the language as decoder_start_token_id, and forces nothing after it."""
    tokenizer = _of_25_languages()
    romanian, german = tokenizer.convert_tokens_to_ids(["ro_RO", "de_DE"])
    own = {"pad_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": romanian}
    folder = make_seq2seq_checkpoint(tmp_path / "mbart", "mbart", **own)
    tokenizer.save_pretrained(folder)
    checkpoint, _, texts = _read(folder)
    default = texts(RequestOptions(prompt="the train"))
    assert (default.tokens, default.first) == ((romanian,), None)
    assert list(default.source) == checkpoint.tokenizer("the train")["input_ids"]
    other = texts(RequestOptions(prompt="the train", target_language="de_DE"))
    assert (other.tokens, other.first) == ((german,), None)
    assert verified_beginning(texts.source) == (romanian, None)


def test_options_of_one_language_pair_apply_to_it_alone() -> None:
    """A language pair may have other options than a prefix, or no prefix."""
    config = PreTrainedConfig(task_specific_params={"translation_en_to_ro": {"decoder_start_token_id": 7}})
    assert TRANSLATION.instructions(config, "translation_en_to_ro").options == {"decoder_start_token_id": 7}
    assert TRANSLATION.instructions(config, "translation_en_to_de").options == {}
    assert not TRANSLATION.instructions(config, "translation_en_to_ro").pairs


def test_language_pair_without_options_gets_none() -> None:
    """A model built without a language pair has the options that all of its pairs share."""
    german = {"prefix": "translate English to German: ", "num_beams": 4, "max_length": 300}
    romanian = {"prefix": "translate English to Romanian: ", "num_beams": 4, "max_length": 200}
    pairs = {"translation_en_to_de": german, "translation_en_to_ro": romanian}
    config = PreTrainedConfig(task_specific_params={**pairs, "translation_en_to_fr": {"prefix": "to French: "}})
    assert TRANSLATION.instructions(config, "translation_en_to_fr").options == {}
    assert TRANSLATION.instructions(config, "translation_en_to_ro").options == {"num_beams": 4, "max_length": 200}
    assert TRANSLATION.instructions(config, "translation").options == {}
    config = PreTrainedConfig(task_specific_params=pairs)
    assert TRANSLATION.instructions(config, "translation").options == {"num_beams": 4}


def test_only_pair_of_a_translator_is_its_default(tmp_path: Path) -> None:
    """Regression: every request had to name the checkpoint's only language pair."""
    own = {"translation_en_to_de": {"prefix": "translate English to German: ", "num_beams": 2}}
    folder = make_seq2seq_checkpoint(tmp_path / "t5", "t5", task_specific_params=own)
    checkpoint, settings, texts = _read(folder, "translation")
    wanted = checkpoint.tokenizer(f"translate English to German: {TEXT}")["input_ids"]
    assert list(texts(RequestOptions(prompt=TEXT)).source) == wanted
    assert list(texts(RequestOptions(prompt=TEXT, source_language="en", target_language="de")).source) == wanted
    assert settings.beams == 2
    with pytest.raises(InputError, match="en to de"):
        texts(RequestOptions(prompt=TEXT, target_language="fr"))


def test_language_shared_by_all_pairs_is_optional(tmp_path: Path) -> None:
    """T5 translates only from English: requests must name the target, and a refusal lists the choices."""
    own = {f"translation_en_to_{code}": {"prefix": f"to {code}: "} for code in ("de", "fr")}
    folder = make_seq2seq_checkpoint(tmp_path / "t5", "t5", task_specific_params=own)
    checkpoint, _, texts = _read(folder, "translation")
    expected = checkpoint.tokenizer(f"to fr: {TEXT}")["input_ids"]
    assert list(texts(RequestOptions(prompt=TEXT, target_language="fr")).source) == expected
    with pytest.raises(InputError, match="target_language is missing; this model knows en to de, en to fr"):
        texts(RequestOptions(prompt=TEXT))


def test_only_pair_of_a_multilingual_model_is_its_default(tmp_path: Path) -> None:
    """The first token is set only in the parameters of the pair, as in mBART's English to Romanian."""
    own = {"translation_en_to_ro": {"num_beams": 3}}
    options = {"pad_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2, "task_specific_params": own}
    folder = make_seq2seq_checkpoint(tmp_path / "mbart", "mbart", multilingual=True, **options)
    checkpoint, settings, texts = _read(folder, "translation")
    assert texts(RequestOptions(prompt="the train")).first == checkpoint.tokenizer.convert_tokens_to_ids("ro_RO")
    assert settings.beams == 3


def test_pair_that_the_tokenizer_lacks_is_not_a_default(tmp_path: Path) -> None:
    own = {"translation_en_to_tlh": {"num_beams": 3}}
    options = {"pad_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2, "task_specific_params": own}
    folder = make_seq2seq_checkpoint(tmp_path / "mbart", "mbart", multilingual=True, **options)
    with pytest.raises(InputError, match="target_language is missing"):
        _read(folder, "translation")[2](RequestOptions(prompt="the train"))


def test_cache_fits_the_longest_answer_of_the_checkpoint(tmp_path: Path) -> None:
    folder = make_seq2seq_checkpoint(tmp_path / "t5", "t5", generation_config={"max_new_tokens": 400})
    assert _read(folder)[1].max_answer == 401


@pytest.mark.parametrize(
    ("own_file", "values", "message"),
    [
        (True, {"max_time": 2.5}, "^generation_config.json says max_time"),
        (False, {"max_time": 2.5}, "^config.json says max_time"),
        (True, {"num_beams": 5}, "^the checkpoint's generation_config.json searches"),
    ],
)
def test_decoder_refusal_names_the_file_that_sets_the_field(
    own_file: bool, values: dict[str, float], message: str, tmp_path: Path
) -> None:
    """Regression: config.json was named for a generation_config.json that transformers derived from a config.json."""
    folder = make_decoder_checkpoint(tmp_path / "llama", "llama")
    file = folder / "generation_config.json"
    settings = {**json.loads(file.read_text()), "_from_model_config": True, **values}
    if own_file:
        file.write_text(json.dumps(settings))
    else:
        file.unlink()
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **values}))
    spec = make_spec(model=str(folder), name="m", slots=4)
    with pytest.raises(BuilderError, match=message):
        begin(spec, resolve(spec), tmp_path, lambda name: nullcontext())


@pytest.mark.parametrize("kind", ["decoder", "encoder-decoder"])
def test_head_sizes_without_a_kernel_are_refused_before_the_export(kind: str, tmp_path: Path) -> None:
    """Regression: heads of size 12 ended in an unexpected error, "head_size must be a multiple of 8"."""
    if kind == "decoder":
        folder, instead = make_decoder_checkpoint(tmp_path / "m", "gpt2", hidden_size=48), "--engine openvino"
    else:
        folder, instead = make_seq2seq_checkpoint(tmp_path / "m", "bart", d_model=48), "no engine here"
    spec = make_spec(model=str(folder), name="m", slots=4)
    with pytest.raises(SpecError, match=f"heads have 12 numbers.*multiples of 8; .*{instead}"):
        begin(spec, resolve(spec), tmp_path, lambda name: nullcontext())


def test_beam_search_with_too_few_slots_is_refused(tmp_path: Path) -> None:
    """Regression: the search ran with fewer beams, or greedily with one slot."""
    folder = make_decoder_checkpoint(tmp_path / "llama", "llama")
    checkpoint = resolve(make_spec(model=str(folder), name="m"))
    checkpoint.model.generation_config.num_beams = 5
    spec = make_spec(model=str(folder), name="m", slots=4)
    with pytest.raises(SpecError, match="searches with 5 beams, which need as many slots; --slots is 4"):
        begin(spec, checkpoint, tmp_path, lambda name: nullcontext())
