"""transformers' generate in fp32: WORK.json CHECKPOINT cache|no-cache. Groups of `concurrency` prompts, padded on the
left; only the tokens a request asked for count."""

from __future__ import annotations

import json
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList
from transformers.utils import logging


class First(StoppingCriteria):
    """Never stops; remembers when the first token was there."""

    def __init__(self) -> None:
        self.at: float | None = None

    def __call__(self, input_ids: torch.Tensor, scores: object, **options: object) -> torch.Tensor:
        self.at = self.at or time.perf_counter()
        return torch.zeros(len(input_ids), dtype=torch.bool)


def main() -> None:
    warnings.filterwarnings("ignore")
    logging.set_verbosity_error()
    work, cache = json.loads(Path(sys.argv[1]).read_text()), sys.argv[3] == "cache"
    torch.set_num_threads(work["threads"])
    model = AutoModelForCausalLM.from_pretrained(sys.argv[2], dtype=torch.float32).eval()
    first: list[float] = []

    def group(requests: list[dict]) -> None:
        width = max(len(r["prompt"]) for r in requests)
        ids = torch.tensor([[0] * (width - len(r["prompt"])) + r["prompt"] for r in requests])
        mask = torch.tensor([[0] * (width - len(r["prompt"])) + [1] * len(r["prompt"]) for r in requests])
        seen, start = First(), time.perf_counter()
        with torch.inference_mode():
            model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=max(r["new_tokens"] for r in requests),
                do_sample=False,
                use_cache=cache,
                eos_token_id=None,
                pad_token_id=0,
                stopping_criteria=StoppingCriteriaList([seen]),
            )
        first.extend([seen.at - start] * len(requests))

    requests, size = work["requests"], work["concurrency"]
    group([{**requests[0], "new_tokens": 4}])
    first.clear()
    start = time.perf_counter()
    for place in range(0, len(requests), size):
        group(requests[place : place + size])
    seconds = time.perf_counter() - start
    tokens = sum(r["new_tokens"] for r in requests)
    print(json.dumps({"tokens_per_s": tokens / seconds, "first_token_ms": float(np.median(first)) * 1000}))


main()
