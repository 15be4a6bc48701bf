"""One side of `scripts/bench search`: steps of beam search by the `builder` on PYTHONPATH.

Takes rows, vocabulary, steps, and the tokens that no answer may have; prints the milliseconds of each step as JSON.
"""

from __future__ import annotations

import json
import sys
import time

import numpy as np

from builder.runtime.generation.beams import BeamSearch
from builder.runtime.generation.options import RequestOptions
from builder.runtime.generation.processors import Rules

BEAMS, STEPS = 4, 24  # of a search, which then begins anew


def main(rows: int, vocabulary: int, steps: int, *forbidden: int) -> None:
    logits = np.random.default_rng(0).normal(0, 3, (rows, vocabulary)).astype(np.float32)
    options = RequestOptions(temperature=0.0, num_beams=BEAMS)
    rules = Rules(options, (vocabulary,), tuple((token,) for token in forbidden), max_tokens=STEPS + 2)
    times: list[float] = []
    while len(times) < steps:
        searches = [BeamSearch(rules, [0], frozenset()) for _ in range(rows // BEAMS)]
        for search in searches:
            search.step([logits[0]])
        for _ in range(STEPS):
            logits += 0  # it was written a moment before, as by the model
            start = time.perf_counter()
            for index, search in enumerate(searches):
                search.step(list(logits[BEAMS * index : BEAMS * (index + 1)]))
            times.append(1000 * (time.perf_counter() - start))
    print(json.dumps(times[:steps]))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
