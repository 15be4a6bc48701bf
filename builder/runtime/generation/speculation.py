"""Propose speculative tokens of a sequence: by prompt lookup or, greedily, by a draft.

Prompt lookup (Saxena 2023, https://github.com/apoorvumang/prompt-lookup-decoding) proposes the tokens that followed the
same tokens earlier in the sequence, as far as they are probable enough to be worth their time. A draft model has the
same vocabulary (Leviathan et al. 2022, https://arxiv.org/abs/2211.17192), or is a layer that reads the hidden states of
the model that answers (Li et al. 2025, https://arxiv.org/abs/2503.01840). The step of the next token verifies a
proposal: it is accepted as far as it equals the chosen tokens. Knows token ids; does not know how a token is chosen, or
where a sequence runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle, islice

import numpy as np

from .block_manager import PendingWrite
from .executors.base import Executor
from .slot_cache import SlotCache, common_length

INITIAL_DRAFT_LENGTH, MAX_DRAFT_LENGTH = 4, 7  # tokens that a draft model proposes
DRAFT_PROBABILITY = 0.5  # less probable tokens of prompt lookup leave a step to the draft
MIN_PAUSE, MAX_PAUSE = 8, 256  # tokens of an answer
MAX_LOOKUP_LENGTH = 15  # tokens that prompt lookup proposes
PRIORS = (0.2, 0.4, 0.6, 0.6)  # by length of a match, from 1 on: how probable the token is that followed it earlier
LEARNING_RATE = 0.1  # weight of the newest token in these probabilities
# Time of one more token in a step over that of the first (GPT-2, both engines, two cores: 0.03 to 0.17). Counted on
# real texts (scripts/bench lookups), 0.1 gains at least as much as 0.15 and 0.05 with 4 to 16 rows.
TOKEN_COST = 0.1


class DraftLength:
    """Length and pauses of the draft model's proposals for one sequence.

    After a proposal that was accepted whole, the next is two tokens longer; after one with a rejected token, one token
    shorter: the schedule "heuristic" of transformers' assisted generation (generation/candidate_generator.py). One that
    was cut short and accepted says nothing of the tokens that it lacked. After a rejected proposal of one token comes a
    pause, twice as long each time.
    """

    def __init__(self) -> None:
        self.length, self.pause = INITIAL_DRAFT_LENGTH, 0
        self.proposed_at, self.resumes_at = 0, 0  # in tokens of the answer

    def next(self, generated: int) -> int:
        """Return how many tokens to propose after `generated` tokens of an answer; 0 during a pause."""
        self.proposed_at = generated
        return self.length if generated >= self.resumes_at else 0

    def learn(self, proposed: int, accepted: int) -> None:
        """Adjust to the last proposal."""
        if accepted == proposed:
            if proposed == self.length:
                self.length, self.pause = min(self.length + 2, MAX_DRAFT_LENGTH), 0
        elif self.length > 1:
            self.length -= 1
        else:
            self.pause = min(max(2 * self.pause, MIN_PAUSE), MAX_PAUSE)
            self.resumes_at = self.proposed_at + self.pause


def least_probability(rows: int) -> float:
    """Return how probable a speculative token must be to pay for itself in a step that decodes `rows` tokens.

    It pays if it yields more for its time than the step without it: `rows` tokens in 1 + `TOKEN_COST` * (`rows` - 1).
    """
    return TOKEN_COST * rows / (1 + TOKEN_COST * (rows - 1))


class PromptLookup:
    """Proposals for one sequence: the tokens after the last occurrence of the longest match, of up to 4 tokens.

    Each new token shows whether a proposal would have been right, also where there was none. So the probabilities of
    the next proposals, by length of a match, are those of this text.
    """

    def __init__(self, tokens: "Sequence[int]") -> None:
        self.tokens = list(tokens[:-1])
        self.probabilities = list(PRIORS)
        self.ends: "list[dict[tuple[int, ...], int]]" = []  # by n-gram, for each n: the index after its last occurrence
        for length in range(1, 1 + len(PRIORS)):
            ngrams = zip(*(self.tokens[start:] for start in range(length)))
            self.ends.append(dict(zip(ngrams, range(length, len(tokens)))))
        self.match, self.matched = 0, 0  # the index after the match, and its length; 0: there is none
        self.extend(tokens[-1:])

    def extend(self, tokens: "Sequence[int]") -> None:
        for token in tokens:
            if self.matched:
                self._learn(self.tokens[self.match] == token)
            self.tokens.append(token)
            self.matched = 0
            for length in range(1, 1 + min(len(PRIORS), len(self.tokens))):
                ends, ngram = self.ends[length - 1], tuple(self.tokens[-length:])
                if (end := ends.get(ngram)) is not None:
                    self.match, self.matched = end, length
                ends[ngram] = len(self.tokens)

    def propose(self, limit: int, least: float) -> "list[int]":
        """Return up to `limit` tokens, each kept with a probability of at least `least`; usually none."""
        if not self.matched:
            return []
        count, length, probability = 0, self.matched, self.probabilities[self.matched - 1]
        while probability >= least and count < min(limit, MAX_LOOKUP_LENGTH):
            count, length = count + 1, min(length + 1, len(PRIORS))
            probability *= self.probabilities[length - 1]
        followed = self.tokens[self.match : self.match + count]
        return list(islice(cycle(followed), count))  # what follows a text's end is the proposal itself

    def _learn(self, right: bool) -> None:
        index = self.matched - 1
        self.probabilities[index] += LEARNING_RATE * (right - self.probabilities[index])


class Drafter:
    """Draft model over `executor`, which caches as many sequences as it has slots, the least recent evicted first.

    Each proposal compares its cache with the sequence, so rejected tokens and preempted sequences need no special care.
    `vocabulary`: number of tokens to choose from; the draft may have more rows in its last matrix.
    """

    def __init__(self, executor: Executor, vocabulary: int) -> None:
        geometry = executor.geometry
        self.executor, self.vocabulary = executor, vocabulary
        self.cache = SlotCache(geometry.slots, geometry.max_length, executor.copy, blocks=executor.blocks)
        self.slots: "dict[int, int]" = {}  # by number of the sequence, the most recent at the end
        self.prefill_budget, self.budget = 0, 0

    def start_step(self, prefill_budget: int, budget: int) -> None:
        """Start a step in which the draft prefills at most `prefill_budget` tokens, and proposes at most `budget`."""
        self.prefill_budget, self.budget = prefill_budget, budget

    def propose(self, number: int, tokens: "Sequence[int]", count: int, target_slot: int) -> "list[int]":
        """Return `count` tokens that may follow the sequence's `tokens`, or none until these are prefilled.

        `target_slot`: where the answering model caches all of them but the last.
        """
        slot = self._slot(number, tokens)
        start = self.cache.length(slot)
        chunk = tokens[start : start + self.prefill_budget]
        self.prefill_budget -= len(chunk)
        proposed = [self._run(slot, chunk)] if chunk else []
        if start + len(chunk) < len(tokens):
            return []
        while len(proposed) < count:
            proposed.append(self._run(slot, proposed[-1:]))
        return proposed

    def _slot(self, number: int, tokens: "Sequence[int]") -> int:
        """Return the sequence's slot, trimmed to a prefix of `tokens` without the last, which is to run."""
        slot = self.slots.pop(number, None)
        if slot is None:
            if not self.cache.free_slots:
                self._evict()
            slot = self.cache.allocate(tokens).slot
        else:
            self.cache.trim(slot, min(common_length(tokens, self.cache.tokens[slot]), len(tokens) - 1))
        self.slots[number] = slot
        return slot

    def _run(self, slot: int, tokens: "Sequence[int]") -> int:
        """Run `tokens`, which come next in `slot`, and return the draft's most probable next token."""
        start = self.cache.length(slot)
        self._reserve(PendingWrite(slot, start, start + len(tokens)))
        positions = np.array([start], np.int64)
        logits = self.executor.run(slot, np.array([tokens], np.int64), positions)
        self.cache.record(slot, positions, {slot: tokens})
        return int(logits[0, : self.vocabulary].argmax())

    def _reserve(self, pending: PendingWrite) -> None:
        """Evict other sequences until there are blocks for `pending`, where slots share blocks."""
        while not self.cache.evict_for([pending]) and len(self.slots) > 1:
            self._evict()

    def _evict(self) -> None:
        """Free the slot of the least recent sequence."""
        self.cache.release(self.slots.pop(next(iter(self.slots))))


class HiddenStatesDrafter(Drafter):
    """Draft over `executor` that reads a token together with the hidden states of `target` at the token before it.

    So the first token has no place in its cache, and its cached tokens are one more than its positions. The tokens that
    it proposes run with its own hidden states, as `target` has none yet: they are not recorded as cached, and run again
    if they are kept. A draft whose keys and values are its target's (`drafts_in_place`) has none of those tokens: they
    all run at the place of the last one.
    """

    def __init__(self, executor: Executor, target: Executor) -> None:
        super().__init__(executor, target.geometry.vocabulary)
        self.target = target

    def propose(self, number: int, tokens: "Sequence[int]", count: int, target_slot: int) -> "list[int]":
        slot = self._slot(number, tokens)
        start = max(1, self.cache.length(slot))
        chunk = tokens[start : start + self.prefill_budget]
        self.prefill_budget -= len(chunk)
        if not chunk:
            return []
        end = start + len(chunk)
        self._reserve(PendingWrite(slot, start - 1, end - 2 + count))
        hidden_states = self.target.hidden_states(target_slot, start - 1, end - 1)
        token, hidden_states = self.executor.draft_token(slot, chunk, start - 1, hidden_states)
        self.cache.record(slot, np.zeros(1, np.int64), {slot: tokens[:end]})
        if end < len(tokens):
            return []
        proposed = [token]
        while len(proposed) < count:
            place = end - 2 + (0 if self.executor.drafts_in_place else len(proposed))
            token, hidden_states = self.executor.draft_token(slot, proposed[-1:], place, hidden_states)
            proposed.append(token)
        return proposed
