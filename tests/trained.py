"""Small models with a right answer, trained here: every variant has a true accuracy to lose.

Questions about passages, entities of sentences, and a language model on text that ships with Python; created by code
from fixed seeds, in about a minute each on two cores. They are trained once and cached in the user's cache, under the
hash of the file that trains and the versions it ran with.
"""

from __future__ import annotations

import fcntl
import hashlib
import inspect
import json
import os
import pydoc_data.topics
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import AutoConfig, PreTrainedTokenizerFast

from tests.tiny_encoders import SPECIAL, make_tokenizer

PEOPLE = ("anna", "ben", "carla", "david", "emma", "felix", "greta", "hugo", "irene", "jonas", "klara", "leo")
PLACES = ("oslo", "rome", "lima", "paris", "cairo", "delhi", "quito", "tokyo", "berlin", "madrid", "vienna", "dublin")
DAYS = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")
THINGS = ("kettle", "cello", "bicycle", "violin", "camera", "hammer", "ladder", "lantern", "compass", "typewriter")
FRAMES = (
    "{person} went to {place} on {day} with a {thing} .",
    "on {day} {person} sold a {thing} in {place} .",
    "{person} came back from {place} on {day} and bought a {thing} .",
    "in {place} {person} lost a {thing} on {day} .",
)
QUESTIONS = {"place": "where was it ?", "day": "when was it ?", "thing": "what was it about ?"}
WORDS = sorted({word for frame in (*FRAMES, *QUESTIONS.values()) for word in frame.split() if "{" not in word})
LABELS = {0: "O", 1: "B-PER", 2: "B-LOC", 3: "B-DAY"}
KINDS = {"person": 1, "place": 2, "day": 3}

Sample = dict[str, Any]


def question_answering() -> tuple[Path, Path]:
    """Return (checkpoint, samples with labels): a sentence and a question about it; some have no answer."""
    return cached_training("question-answering", _train_questions)


def token_classification() -> tuple[Path, Path]:
    """Return (checkpoint, samples with labels): people, places and days of two sentences."""
    return cached_training("token-classification", _train_tags)


def language_model() -> tuple[Path, Path]:
    """Return (checkpoint, samples): English about Python, from the topics that pydoc prints."""
    return cached_training("language-model", _train_language)


def cached_training(name: str, train: Callable[[Path], list[Sample]]) -> tuple[Path, Path]:
    """Return the folder of a trained model and its samples that it never saw; the first caller trains it."""
    digest = hashlib.sha256(Path(inspect.getfile(train)).read_bytes())
    digest.update(f"{torch.__version__} {transformers.__version__}".encode())
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "build-repo" / "trained"
    folder = home / f"{name}-{digest.hexdigest()[:16]}"
    home.mkdir(parents=True, exist_ok=True)
    with (home / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "samples.jsonl").is_file():
            shutil.rmtree(folder, ignore_errors=True)
            (folder / "model").mkdir(parents=True)
            samples = train(folder / "model")
            lines = "".join(json.dumps(sample) + "\n" for sample in samples)
            (folder / "samples.jsonl").write_text(lines)
    return folder / "model", folder / "samples.jsonl"


def _sentences(seed: int) -> Iterator[tuple[str, list[dict[str, str]]]]:
    """Return two sentences about two people: their places, times and objects."""
    generator = np.random.default_rng(seed)
    while True:
        people = generator.choice(PEOPLE, 2, replace=False)
        facts = [
            {
                "person": str(person),
                "place": str(generator.choice(PLACES)),
                "day": str(generator.choice(DAYS)),
                "thing": str(generator.choice(THINGS)),
            }
            for person in people
        ]
        yield " ".join(str(generator.choice(FRAMES)).format(**fact) for fact in facts), facts


def _word_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    words = [*SPECIAL.values(), *PEOPLE, *PLACES, *DAYS, *THINGS, *WORDS]
    tokenizer = Tokenizer(models.WordPiece({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    ids = [(token, tokenizer.token_to_id(token)) for token in ("[CLS]", "[SEP]")]
    pair = "[CLS] $A [SEP] $B:1 [SEP]:1"
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", pair=pair, special_tokens=ids)
    names = ["input_ids", "token_type_ids", "attention_mask"]
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_input_names=names, model_max_length=64, **SPECIAL)
    made.save_pretrained(folder)
    return made


def _bert(auto_class: Any, tokenizer: PreTrainedTokenizerFast, **options: Any) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "bert",
        vocab_size=len(tokenizer),
        hidden_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=512,
        max_position_embeddings=64,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        pad_token_id=0,
        **options,
    )
    return auto_class.from_config(config)


def fit(model: Any, batches: Iterator[dict[str, Any]], steps: int, rate: float) -> None:
    """Train `model` on that many batches."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps)
    for _ in range(steps):
        loss = model(**next(batches)).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    model.eval()


def _question_samples(seed: int) -> Iterator[Sample]:
    generator = np.random.default_rng(seed)
    for text, facts in _sentences(seed):
        context, fact = text.split(" . ")[0] + " .", facts[0]
        kind = str(generator.choice(list(QUESTIONS)))
        answers = [fact[kind]]
        if generator.random() < 0.2:
            words = [word for word in context.split() if word != fact[kind]]
            context, answers = " ".join(words), []
        yield {"question": QUESTIONS[kind], "context": context, "answers": answers}


def question_batches(tokenizer: PreTrainedTokenizerFast, seed: int, size: int = 64) -> Iterator[dict[str, Any]]:
    """Yield questions with the start and end of their answers, for ever."""
    stream = _question_samples(seed)
    while True:
        samples = [next(stream) for _ in range(size)]
        encoded = tokenizer(
            [s["question"] for s in samples], [s["context"] for s in samples], return_tensors="pt", padding=True
        )
        starts = []
        for row, sample in enumerate(samples):
            found = [sample["context"].index(answer) for answer in sample["answers"]]
            starts.append(encoded.char_to_token(row, found[0], 1) if found else 0)
        yield {**encoded, "start_positions": torch.tensor(starts), "end_positions": torch.tensor(starts)}


def _train_questions(folder: Path) -> list[Sample]:
    tokenizer = _word_tokenizer(folder)
    model = _bert(transformers.AutoModelForQuestionAnswering, tokenizer)

    fit(model, question_batches(tokenizer, seed=1, size=32), steps=300, rate=1e-3)
    model.save_pretrained(folder)
    unseen = _question_samples(seed=2)
    samples = [next(unseen) for _ in range(200)]
    return [{**sample, "handle_impossible_answer": True} for sample in samples]


def _tag_samples(seed: int) -> Iterator[Sample]:
    for text, facts in _sentences(seed):
        entities = []
        for word in re.finditer(r"\w+", text):
            for kind, label in KINDS.items():
                if word[0] in [fact[kind] for fact in facts]:
                    span = {"start": word.start(), "end": word.end(), "entity": LABELS[label]}
                    entities.append(span)
        yield {"text_input": text, "entities": entities}


def _train_tags(folder: Path) -> list[Sample]:
    tokenizer = _word_tokenizer(folder)
    numbers = {label: index for index, label in LABELS.items()}
    model = _bert(transformers.AutoModelForTokenClassification, tokenizer, id2label=LABELS, label2id=numbers)

    def batches(size: int = 32) -> Iterator[dict[str, Any]]:
        stream = _tag_samples(seed=1)
        while True:
            samples = [next(stream) for _ in range(size)]
            encoded = tokenizer([s["text_input"] for s in samples], return_tensors="pt", padding=True)
            labels = torch.where(encoded["attention_mask"].bool(), 0, -100)
            for row, sample in enumerate(samples):
                for span in sample["entities"]:
                    labels[row, encoded.char_to_token(row, span["start"])] = numbers[span["entity"]]
            yield {**encoded, "labels": labels}

    fit(model, batches(), steps=150, rate=1e-3)
    model.save_pretrained(folder)
    unseen = _tag_samples(seed=2)
    return [next(unseen) for _ in range(100)]


def _train_language(folder: Path) -> list[Sample]:
    tokenizer = make_tokenizer("bpe", type_ids=False)
    tokenizer.backend_tokenizer.post_processor = None
    tokenizer.bos_token, tokenizer.eos_token = "[CLS]", "[SEP]"
    tokenizer.save_pretrained(folder)
    text = " ".join(re.sub(r"\s+", " ", topic) for _, topic in sorted(pydoc_data.topics.topics.items()))
    ids = torch.tensor(tokenizer(text[:400_000])["input_ids"])
    torch.manual_seed(0)
    config = AutoConfig.for_model("gpt2", vocab_size=600, n_positions=256, n_embd=64, n_layer=2, n_head=2)
    config.attn_pdrop = config.embd_pdrop = config.resid_pdrop = 0.0
    model = transformers.AutoModelForCausalLM.from_config(config)

    def batches(size: int = 8, length: int = 64) -> Iterator[dict[str, Any]]:
        generator = torch.Generator().manual_seed(1)
        while True:
            starts = torch.randint(0, len(ids) - length, (size,), generator=generator)
            rows = torch.stack([ids[start : start + length] for start in starts])
            yield {"input_ids": rows, "labels": rows}

    fit(model, batches(), steps=250, rate=8e-3)
    model.save_pretrained(folder)
    return [{"text_input": text[400_000 + 400 * n : 400_000 + 400 * n + 300]} for n in range(24)]
