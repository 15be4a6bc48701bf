"""Choose tokens from logits, for all rows of a step at once; each row has its own options and random stream.

Filters are those of transformers' logits processors, in its order: the rules of the request, temperature, top-k, top-p
(arXiv:1904.09751), min-p (arXiv:2407.01082), locally typical (arXiv:2202.00666), epsilon and eta (arXiv:2210.15191).
Knows arrays; knows no text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from .executors.base import TokenCandidates
from .guides import Guide
from .options import RequestOptions
from .processors import Rules
from .scores import highest

EXAMINED_TOKENS = 1024  # most probable tokens, filtered first; all are filtered if these do not settle the choice


@dataclass
class Sampler:
    """State of one row: the rules of its request, the tokens it generated, and its random stream."""

    rules: Rules
    stream: int = 0  # index among the request's n sequences
    prompt: "Sequence[int]" = ()
    generated: "list[int]" = field(default_factory=list)
    guide: "Guide | None" = None
    random: np.random.Generator = field(init=False)

    def __post_init__(self) -> None:
        seed = self.options.random_seed
        if seed < 0:
            seed = int(np.random.SeedSequence().generate_state(1, np.uint64)[0])
        self.random = np.random.Generator(np.random.Philox(key=[seed, self.stream]))

    @property
    def options(self) -> RequestOptions:
        return self.rules.options

    @property
    def is_greedy(self) -> bool:
        return self.options.temperature == 0 or self.options.top_k == 1

    @property
    def is_plain(self) -> bool:
        """True if the token with the highest logit is the next token."""
        return self.is_greedy and self.guide is None and self.rules.is_idle(len(self.generated))

    def needs_only_top(self, count: int, tokens: int) -> bool:
        """Return True if the `count` highest logits are enough to choose the next `tokens` tokens."""
        options, length = self.options, len(self.generated)
        if self.guide is not None or options.logprobs >= 0 or not (self.is_greedy or 0 < options.top_k <= count):
            return False
        return all(self.rules.is_idle(generated) for generated in range(length, length + tokens))

    @property
    def is_guided(self) -> bool:
        """True if the guide constrains the next token: any but a first token that the checkpoint forces."""
        return self.guide is not None and len(self.generated) >= self.rules.begin

    def apply(self, scores: np.ndarray) -> None:
        """Apply the rules and the guide to `scores`, (vocabulary,), in place."""
        self.rules.apply(scores, self.prompt, self.generated)
        if self.guide is not None and self.is_guided:
            self.guide.apply(scores)

    @property
    def forced(self) -> "list[int]":
        """Tokens that come next regardless of their scores."""
        return self.guide.forced if self.guide is not None and self.is_guided else []

    def push(self, token: int) -> bool:
        """Append the chosen `token`; return True if it completes the guide."""
        if self.guide is not None and self.is_guided and token not in self.rules.ends:
            self.guide.push(token)
        self.generated.append(token)
        return self.guide is not None and self.guide.complete


@dataclass(frozen=True)
class TokenChoice:
    """Chosen token and, if requested, its log-probability and those of the most probable tokens, best first."""

    token: int
    logprob: "float | None" = None
    top: "tuple[tuple[int, float], ...]" = ()


def choose(logits: "np.ndarray | TokenCandidates", samplers: "Sequence[Sampler]") -> "list[TokenChoice]":
    """Choose a token for each row of `logits`, (rows, vocabulary) float32, which are not changed.

    `logits` may instead be TokenCandidates, if they are enough for every row (`needs_only_top`).
    """
    if isinstance(logits, TokenCandidates):
        places = choose(logits.logits, samplers)
        return [TokenChoice(int(tokens[position.token])) for tokens, position in zip(logits.tokens, places)]
    tokens = np.zeros(len(samplers), np.int64)
    is_plain = [sampler.is_plain for sampler in samplers]
    plain = [row for row, alone in enumerate(is_plain) if alone]
    if plain:
        tokens[plain] = _rows(logits, plain).argmax(axis=-1)
    rest = []
    for row in [row for row, alone in enumerate(is_plain) if not alone]:
        forced = samplers[row].forced
        if forced:
            tokens[row] = forced[0]
        else:
            rest.append(row)
    if rest:
        scores = np.array(_rows(logits, rest), dtype=np.float32)
        for row, index in enumerate(rest):
            samplers[index].apply(scores[row])
        greedy = [row for row, index in enumerate(rest) if samplers[index].is_greedy]
        if greedy:
            tokens[[rest[row] for row in greedy]] = _rows(scores, greedy).argmax(axis=-1)
        sampled = [row for row, index in enumerate(rest) if not samplers[index].is_greedy]
        if sampled:
            chosen = _sample(_rows(scores, sampled), [samplers[rest[row]] for row in sampled])
            tokens[[rest[row] for row in sampled]] = chosen
    logprobs = [sampler.options.logprobs for sampler in samplers]
    return [
        TokenChoice(token) if top < 0 else scored_choice(logits[row], token, top)
        for row, (token, top) in enumerate(zip(tokens.tolist(), logprobs))
    ]


def _rows(array: np.ndarray, rows: "list[int]") -> np.ndarray:
    return array if len(rows) == len(array) else array[rows]


def _sample(scores: np.ndarray, samplers: "Sequence[Sampler]") -> np.ndarray:
    """Draw a token for each row of (rows, vocabulary) from the tokens that the filters leave."""
    temperature = np.array([sampler.options.temperature for sampler in samplers], np.float32)
    scores = scores / temperature[:, None]
    tokens = np.zeros(len(samplers), np.int64)
    kinds = [_num_examined(sampler.options) for sampler in samplers]
    groups = [[row for row, kind in enumerate(kinds) if kind == group] for group in sorted(set(kinds))]
    # all that can fail comes before the first draw, so that a retry finds the random streams unchanged
    found = [_probabilities(_rows(scores, rows), [samplers[row].options for row in rows]) for rows in groups]
    for rows, (order, probabilities) in zip(groups, found):
        drawn = _draw(probabilities, [samplers[row] for row in rows])
        tokens[rows] = drawn if order is None else order[np.arange(len(rows)), drawn]
    return tokens


def _num_examined(options: RequestOptions) -> int:
    """Return how many of a row's tokens to examine first, at least its top-k; 0 if the row has no filter.

    Rows with the same number are filtered together, so another row's large top-k does not make a row sort more.
    """
    return max(EXAMINED_TOKENS, options.top_k) if _filters(options) else 0


def _probabilities(scores: np.ndarray, options: "Sequence[RequestOptions]") -> "tuple[np.ndarray | None, np.ndarray]":
    """Return each row's tokens, best first (None for all in their own order), and their probabilities."""
    return _candidates(scores, options) if _filters(options[0]) else (None, _softmax(scores))


def _candidates(scores: np.ndarray, options: "Sequence[RequestOptions]") -> "tuple[np.ndarray, np.ndarray]":
    """Return each row's tokens, best first, and their probabilities after all filters.

    Only some of the tokens are examined if these settle the choice. All `options` have the same `_num_examined`.
    """
    size = min(_num_examined(options[0]), scores.shape[1])
    order, allowed = _filter(scores, options, size)
    if size < scores.shape[1] and not _is_settled(order, allowed, options):
        order, allowed = _filter(scores, options, scores.shape[1])
    return order, allowed


def _filters(options: RequestOptions) -> bool:
    return (
        bool(options.top_k)
        or options.top_p < 1
        or options.min_p > 0
        or options.typical_p < 1
        or options.epsilon_cutoff > 0
        or options.eta_cutoff > 0
    )


def _filter(scores: np.ndarray, options: "Sequence[RequestOptions]", size: int) -> "tuple[np.ndarray, np.ndarray]":
    """Return the `size` best tokens of each row, best first, and their probabilities after all filters."""
    vocabulary = scores.shape[1]
    if size < vocabulary:
        order = np.argpartition(scores, vocabulary - size, axis=-1)[:, vocabulary - size :]
        order.sort(axis=-1)  # among equal scores the lower id comes first, as in the full sort
        values = np.take_along_axis(scores, order, axis=-1)
    else:
        order, values = np.broadcast_to(np.arange(vocabulary), scores.shape), scores
    ranks = np.argsort(-values, axis=-1, kind="stable")
    order, values = np.take_along_axis(order, ranks, axis=-1), np.take_along_axis(values, ranks, axis=-1)
    top_k = np.array([o.top_k or vocabulary for o in options])
    # each filter renormalises over the tokens that the previous one left, as transformers' processors do
    allowed = np.isfinite(values) & (np.arange(size) < top_k[:, None])
    outside = np.where(top_k < vocabulary, 0.0, _mass(scores, values))
    probabilities = _normalised(values, allowed, outside)
    top_p = np.array([o.top_p for o in options])[:, None]
    allowed &= (np.cumsum(probabilities, axis=-1) - probabilities < top_p) | (np.arange(size) < 1) | (top_p >= 1)
    probabilities = _normalised(values, allowed, np.where(top_p[:, 0] < 1, 0.0, outside))
    min_p = np.array([o.min_p for o in options])[:, None]
    allowed &= probabilities >= min_p * probabilities.max(axis=-1, keepdims=True)
    if any(o.typical_p < 1 for o in options):
        allowed &= _typical(_normalised(values, allowed, np.zeros(len(options))), allowed, options)
    if any(o.epsilon_cutoff > 0 or o.eta_cutoff > 0 for o in options):
        outside = np.where((top_p[:, 0] < 1) | (min_p[:, 0] > 0), 0.0, outside)
        allowed = _above_cutoffs(values, allowed, outside, options)
    return order, _normalised(values, allowed, np.zeros(len(options)))


def _mass(scores: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return, for each row, the sum of exp(score - best) over the tokens that are not among `values`."""
    best = values[:, :1]
    if values.shape[1] == scores.shape[1]:
        return np.zeros(len(scores))
    return np.maximum(np.exp(scores - best).sum(axis=-1) - np.exp(values - best).sum(axis=-1), 0.0)


def _is_settled(order: np.ndarray, allowed: np.ndarray, options: "Sequence[RequestOptions]") -> bool:
    """Return True if no token outside the candidates could have passed the filters."""
    for row, option in enumerate(options):
        if 0 < option.top_k <= order.shape[1]:
            continue
        if allowed[row, -1] > 0 or option.typical_p < 1 or option.eta_cutoff > 0:
            return False
    return True


def _typical(probabilities: np.ndarray, allowed: np.ndarray, options: "Sequence[RequestOptions]") -> np.ndarray:
    """Keep the tokens whose surprise is nearest to the entropy, until their mass reaches typical_p."""
    logs = np.log(np.where(allowed, probabilities, 1.0))
    entropy = -(probabilities * logs).sum(axis=-1, keepdims=True)
    distance = np.where(allowed, np.abs(-logs - entropy), np.inf)
    ranks = np.argsort(distance, axis=-1, kind="stable")
    mass = np.cumsum(np.take_along_axis(probabilities, ranks, axis=-1), axis=-1)
    limit = np.array([o.typical_p for o in options])[:, None]
    before = np.concatenate([np.zeros((len(mass), 1)), mass[:, :-1]], axis=-1)
    chosen = np.zeros_like(allowed)
    np.put_along_axis(chosen, ranks, (before < limit) | (limit >= 1), axis=-1)
    return chosen


def _above_cutoffs(
    values: np.ndarray, allowed: np.ndarray, outside: np.ndarray, options: "Sequence[RequestOptions]"
) -> np.ndarray:
    """Keep the tokens above a fixed probability, and above one that falls with the entropy (arXiv:2210.15191)."""
    best = np.arange(values.shape[1]) == allowed.argmax(axis=-1)[:, None]  # True for the best remaining token
    epsilon = np.array([o.epsilon_cutoff for o in options])[:, None]
    allowed = allowed & ((_normalised(values, allowed, outside) >= epsilon) | best)
    eta = np.array([o.eta_cutoff for o in options])[:, None]
    probabilities = _normalised(values, allowed, np.where(epsilon[:, 0] > 0, 0.0, outside))
    logs = np.log(np.where(probabilities > 0, probabilities, 1.0))
    entropy = -(probabilities * logs).sum(axis=-1, keepdims=True)
    return allowed & ((probabilities >= np.minimum(eta, np.sqrt(eta) * np.exp(-entropy))) | best)


def _normalised(values: np.ndarray, allowed: np.ndarray, outside: np.ndarray) -> np.ndarray:
    """Return probabilities of the kept values; `outside` is the mass beyond them, relative to the best."""
    weights = np.where(allowed, np.exp((values - values[:, :1]).astype(np.float64)), 0.0)
    return weights / (weights.sum(axis=-1) + outside)[:, None]


def _softmax(scores: np.ndarray) -> np.ndarray:
    weights = np.exp((scores - scores.max(axis=-1, keepdims=True)).astype(np.float64))
    return weights / weights.sum(axis=-1, keepdims=True)


def _draw(probabilities: np.ndarray, samplers: "Sequence[Sampler]") -> np.ndarray:
    """Draw by inverse transform sampling, with one uniform number of each row's own stream."""
    cumulative = np.cumsum(probabilities, axis=-1)
    uniform = np.array([sampler.random.random() for sampler in samplers])
    target = uniform * cumulative[:, -1]
    return np.array([np.searchsorted(row, value, side="right") for row, value in zip(cumulative, target)]).clip(
        0, probabilities.shape[1] - 1
    )


def most_probable(logits: np.ndarray, count: int) -> np.ndarray:
    """Return the `count` tokens with the highest `logits`, (vocabulary,), best first; ties go to the lower id.

    Tokens with a logit of -inf are left out.
    """
    nothing = np.zeros(1, np.float32)
    return highest([logits], nothing, nothing, count)[1]


def scored_choice(logits: np.ndarray, token: int, count: int) -> TokenChoice:
    """Return `token` with its log-probability and those of the `count` best, from `logits`, (vocabulary,)."""
    best = float(logits.max())
    total = best + float(np.log(np.exp((logits - best).astype(np.float64)).sum()))
    top = most_probable(logits, count).tolist() if count else []
    return TokenChoice(token, float(logits[token]) - total, tuple((int(t), float(logits[t]) - total) for t in top))
