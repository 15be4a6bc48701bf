"""transformers' generate in fp32: WORK.json CHECKPOINT cache|no-cache.

Groups of `concurrency` prompts, padded on the left; only the tokens a request asked for count.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path

import torch
from clock import Clock
from transformers import AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList
from transformers.utils import logging


class Watch(StoppingCriteria):
    """Stopping criterion that never stops, and records each token that a request asked for."""

    def __init__(self, clock: Clock, requests: list[tuple[int, dict]]) -> None:
        self.clock, self.left = clock, {name: request["new_tokens"] for name, request in requests}

    def __call__(self, input_ids: torch.Tensor, scores: object, **options: object) -> torch.Tensor:
        for name, left in self.left.items():
            if left:
                self.clock.tokens(name)
                self.left[name] = left - 1
        return torch.zeros(len(input_ids), dtype=torch.bool)


def main() -> None:
    warnings.filterwarnings("ignore")
    logging.set_verbosity_error()
    work, cache = json.loads(Path(sys.argv[1]).read_text()), sys.argv[3] == "cache"
    torch.set_num_threads(work["threads"])
    model = AutoModelForCausalLM.from_pretrained(sys.argv[2], dtype=torch.float32).eval()

    def group(clock: Clock, named: list[tuple[int, dict]]) -> None:
        requests = [request for _, request in named]
        width = max(len(r["prompt"]) for r in requests)
        ids = torch.tensor([[0] * (width - len(r["prompt"])) + r["prompt"] for r in requests])
        mask = torch.tensor([[0] * (width - len(r["prompt"])) + [1] * len(r["prompt"]) for r in requests])
        for name, _ in named:
            clock.send(name)
        with torch.inference_mode():
            model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=max(r["new_tokens"] for r in requests),
                do_sample=False,
                use_cache=cache,
                eos_token_id=None,
                pad_token_id=0,
                stopping_criteria=StoppingCriteriaList([Watch(clock, named)]),
            )

    requests, size = list(enumerate(work["requests"])), work["concurrency"]
    group(Clock(), [(0, {**requests[0][1], "new_tokens": 4})])
    clock = Clock()
    for start in range(0, len(requests), size):
        group(clock, requests[start : start + size])
    print(json.dumps(clock.figures()))


main()
