"""An encoder-decoder's graphs against PyTorch: the same probabilities token by token, the same answers, the same text.

The build runs what Triton will serve: the emitted engine over the graphs. Knows tokens; knows no architecture.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from onnxruntime.capi.onnxruntime_pybind11_state import Fail, InvalidArgument, RuntimeException
from sacrebleu.metrics.chrf import CHRF
from transformers import PreTrainedModel

from builder.building.verify.emitted import ForcedRow, PromptedRequest, answer, perplexity, teacher_forced
from builder.building.verify.generation import MAX_TIE_GAP, ROWS, generate_with, refuse_wrong_probabilities
from builder.building.verify.recording import Case, Recorder
from builder.common.errors import VerificationError, first_line
from builder.graphs.onnx.graph import Graph
from builder.runtime.contract import LayerShape, Session
from builder.runtime.generation.executors.base import Geometry
from builder.runtime.generation.executors.encoding import CrossGeometry
from builder.runtime.generation.executors.onnxruntime_seq2seq import CrossAttending
from builder.runtime.generation.options import RequestOptions
from builder.runtime.generation.processors import Rules

RUN_ERRORS = (Fail, RuntimeException, InvalidArgument, RuntimeError)
NEW_TOKENS = 32
MAX_SAMPLE_TOKENS = 128
REPLAYED_SAMPLES, REPLAYED_TOKENS = 3, 8  # samples, and tokens of their answers, on another version of the engine
SEARCHED_SAMPLES = 4  # samples that beam search answers too, in which PyTorch is slow


@dataclass(frozen=True)
class Graphs:
    """Encoder and decoder that belong together, and the shapes of the tensors between calls."""

    encoder: Graph
    decoder: Graph
    caches: tuple[LayerShape, ...]
    cross: tuple[LayerShape, ...]
    beams: int
    vocabulary: int

    @property
    def size(self) -> int:
        return self.encoder.size + self.decoder.size

    def executor(self, slots: int, max_length: int, max_source: int, threads: int) -> CrossAttending:
        """Return the emitted executor over these graphs."""
        geometry = Geometry(slots, max_length, self.vocabulary, Geometry.pairs(self.caches))
        cross = CrossGeometry(max_source, self.beams, Geometry.pairs(self.cross))
        return CrossAttending(self.decoder.path, self.encoder.path, geometry, cross, Session(threads=threads))


@dataclass(frozen=True)
class Seq2SeqReference:
    """PyTorch's answers to the samples, greedily and, where the model is built for it, by beam search.

    `first` is the token that each answer is made to begin with, if there is one.
    """

    sources: tuple[tuple[int, ...], ...]
    start: int
    first: int | None
    ends: tuple[int, ...]
    greedy: tuple[tuple[int, ...], ...]
    best: tuple[np.ndarray, ...]  # at each position of the greedy answer, the most probable token
    logprobs: tuple[np.ndarray, ...]  # and the answer's own token's log-probability
    beams: int
    searched_sources: tuple[tuple[int, ...], ...]
    searched: tuple[tuple[int, ...], ...]

    @property
    def perplexity(self) -> float:
        return perplexity(self.logprobs)

    @property
    def taught(self) -> list[ForcedRow]:
        """Greedy answers, to be fed to the graphs."""
        answers = zip(self.greedy, self.best, strict=True)
        return [ForcedRow((self.start, *answer[:-1]), answer, best) for answer, best in answers]


@dataclass(frozen=True)
class Seq2SeqAgreement:
    """Agreement of graphs with PyTorch's answers."""

    error: float  # largest difference of a token's log-probability
    hits: float  # share of positions whose most probable token is PyTorch's
    perplexity: float
    greedy: tuple[tuple[int, ...], ...]
    searched: tuple[tuple[int, ...], ...]
    alone: float  # share of greedy answers that are the same alone and among others


def make_reference(
    model: PreTrainedModel,
    sources: Sequence[Sequence[int]],
    start: int,
    first: int | None,
    ends: Sequence[int],
    beams: int,
) -> Seq2SeqReference:
    """Let PyTorch answer `sources`, one by one."""
    sampled = tuple(tuple(source[:MAX_SAMPLE_TOKENS]) for source in sources)
    greedy, best, logprobs = [], [], []
    for source in sampled:
        tokens = pytorch_answer(model, source, start, ends, NEW_TOKENS, forced_bos_token_id=first)[0]
        with torch.no_grad():
            inputs = torch.tensor([[start, *tokens[:-1]]])
            logits = model(input_ids=torch.tensor([source]), decoder_input_ids=inputs, use_cache=False).logits[0]
        own = torch.log_softmax(logits.float(), dim=-1).gather(-1, torch.tensor(tokens)[:, None])
        greedy.append(tokens)
        best.append(logits.argmax(dim=-1).numpy())
        logprobs.append(own[:, 0].numpy())
    options = {"num_beams": beams, "forced_bos_token_id": first}
    chosen = sampled[:: max(1, len(sampled) // SEARCHED_SAMPLES)][:SEARCHED_SAMPLES] if beams > 1 else ()
    searched = tuple(pytorch_answer(model, source, start, ends, NEW_TOKENS, **options)[0] for source in chosen)
    answers = (tuple(greedy), tuple(best), tuple(logprobs))
    return Seq2SeqReference(sampled, start, first, tuple(ends), *answers, beams, chosen, searched)


def pytorch_answer(
    model: PreTrainedModel, source: Sequence[int], start: int, ends: Sequence[int], count: int, **options: Any
) -> list[tuple[int, ...]]:
    """Run `model.generate` with `options` alone, none of the checkpoint's: new tokens of each returned sequence."""
    settings = {
        "do_sample": False,
        "num_beams": 1,
        "max_new_tokens": count,
        "min_length": 0,
        "early_stopping": False,
        "length_penalty": 1.0,
        "repetition_penalty": 1.0,
        "no_repeat_ngram_size": 0,
        "encoder_no_repeat_ngram_size": 0,
        "forced_bos_token_id": None,
        "forced_eos_token_id": None,
        "bad_words_ids": None,
        "suppress_tokens": None,
        "decoder_start_token_id": start,
        "eos_token_id": list(ends) or None,
        "pad_token_id": 0,
        **options,
    }
    return [cut(row[1:].tolist(), ends, count) for row in generate_with(model, source, **settings)]


def cut(tokens: Sequence[int], ends: Sequence[int], count: int) -> tuple[int, ...]:
    """Cut after the first end token; the rest is padding."""
    places = [index for index, token in enumerate(tokens) if token in ends]
    return tuple(tokens[: places[0] + 1] if places else tokens[:count])


def measure(graphs: Graphs, reference: Seq2SeqReference, threads: int) -> Seq2SeqAgreement:
    """Run the emitted engine over the reference's texts, together and alone. Raises VerificationError."""
    longest = max(map(len, reference.sources))
    executor = graphs.executor(ROWS, NEW_TOKENS + 1, longest, threads)

    def attach(group: Sequence[int]) -> None:
        """Let rows 0, 1, ... attend to the texts of `group`."""
        for row in range(executor.geometry.slots):
            executor.assign(row, -1, 0)
        for row, encoded in enumerate(executor.encode([reference.sources[index] for index in group])):
            executor.attach(row, encoded)
            executor.assign(row, row, 0)

    try:
        forced = teacher_forced(executor, reference.taught, attach)
    except RUN_ERRORS as error:  # for example, an attention that was exported for one shape alone
        raise VerificationError(
            f"the exported graphs do not run on the samples ({first_line(error)[:200]}). Nothing was "
            "published: this architecture needs a file of its own in builder/graphs/export/architectures"
        ) from error
    forced.refuse_nan()
    greedy = Rules(RequestOptions(temperature=0.0), reference.ends, first=reference.first, max_tokens=NEW_TOKENS)
    prompted = [PromptedRequest((reference.start,), greedy, source) for source in reference.sources]
    together = [hypotheses[0].tokens for hypotheses in answer(executor, prompted)]
    alone = [answer(executor, [one])[0][0].tokens for one in prompted]
    searched: list[tuple[int, ...]] = []
    if reference.beams > 1:
        options = RequestOptions(temperature=0.0, num_beams=reference.beams)
        search = Rules(options, reference.ends, first=reference.first, max_tokens=NEW_TOKENS)
        prompted = [PromptedRequest((reference.start,), search, source) for source in reference.searched_sources]
        searched = [hypotheses[0].tokens for hypotheses in answer(executor, prompted)]
    return Seq2SeqAgreement(
        error=forced.error(reference.logprobs),
        hits=forced.share,
        perplexity=forced.perplexity,
        greedy=tuple(together),
        searched=tuple(searched),
        alone=float(np.mean([a == b for a, b in zip(alone, together, strict=True)])),
    )


def recorded(graphs: Graphs, reference: Seq2SeqReference, threads: int) -> Case:
    """Record the graphs' answers to a few texts together, the first also searched, for another version to repeat.

    The search ends before the rows beside it, which then continue in steps without a search.
    """
    sources, beams = reference.sources[:REPLAYED_SAMPLES], reference.beams
    executor = graphs.executor(len(sources) + beams, REPLAYED_TOKENS + 1, max(map(len, sources)), threads)
    recorder = Recorder(executor)
    requests = [_request_of(reference, source, 1, REPLAYED_TOKENS) for source in sources]
    if beams > 1:
        requests.append(_request_of(reference, sources[0], beams, REPLAYED_TOKENS // 2))
    answer(executor, requests)
    return recorder.case(graphs.decoder.path.name, [graphs.decoder, graphs.encoder], threads)


def _request_of(reference: Seq2SeqReference, source: tuple[int, ...], beams: int, count: int) -> PromptedRequest:
    """Return a request whose answer has `count` tokens, whichever they are."""
    options = RequestOptions(temperature=0.0, num_beams=beams)
    return PromptedRequest((reference.start,), Rules(options, first=reference.first, max_tokens=count), source)


def text_agreement(
    expected: Sequence[Sequence[int]], actual: Sequence[Sequence[int]], decode: Callable[[Sequence[int]], str]
) -> list[float]:
    """Return the chrF (Popović 2015, by sacrebleu) of each answer to PyTorch's, 1 if they are equal token for token."""
    metric = CHRF()
    return [
        1.0 if tuple(a) == tuple(b) else metric.sentence_score(decode(b), [decode(a)]).score / 100
        for a, b in zip(expected, actual, strict=True)
    ]


def refuse_wrong_answers(model: PreTrainedModel, reference: Seq2SeqReference, agreement: Seq2SeqAgreement) -> None:
    """Raise VerificationError if probabilities are off, or an answer differs from PyTorch's without a tie."""
    refuse_wrong_probabilities(agreement.error)
    kinds = (
        ("greedy", reference.sources, reference.greedy, agreement.greedy),
        ("searched", reference.searched_sources, reference.searched, agreement.searched),
    )
    for kind, sources, answers, actual in kinds:
        for source, expected, got in zip(sources, answers, actual, strict=True):
            whole = kind == "searched"
            if expected != got and abs(_gap(model, reference, source, (expected, got), whole)) > MAX_TIE_GAP:
                raise VerificationError(
                    f"a {kind} answer begins {list(got[:6])}, transformers' {list(expected[:6])}, and they are not a "
                    "tie. Nothing was published: this is a bug worth reporting, with the checkpoint's name"
                )


def _gap(
    model: PreTrainedModel,
    reference: Seq2SeqReference,
    source: Sequence[int],
    answers: tuple[Sequence[int], Sequence[int]],
    whole: bool,
) -> float:
    """Return how far apart PyTorch finds two answers, in log-probability per token: up to where they part, or whole."""
    same = next((i for i, (a, b) in enumerate(zip(*answers, strict=False)) if a != b), min(map(len, answers)))
    scores = []
    for tokens in answers:
        part = tokens if whole else tokens[: same + 1]
        with torch.no_grad():
            inputs = torch.tensor([[reference.start, *part[:-1]]])
            logits = model(input_ids=torch.tensor([source]), decoder_input_ids=inputs, use_cache=False).logits[0]
        chosen = torch.log_softmax(logits.double(), dim=-1).gather(-1, torch.tensor(part)[:, None])
        begin = 0 if reference.first is None else 1  # a forced token has no probability
        scores.append(float(chosen[begin:].sum()) / len(part))
    return scores[0] - scores[1]
