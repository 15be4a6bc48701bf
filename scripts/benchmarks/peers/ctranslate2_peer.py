"""CTranslate2: WORK.json CHECKPOINT TYPE, with TYPE int8 or float32. Groups of `concurrency` prompts, as its
generate_batch takes them; only the tokens a request asked for count."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import ctranslate2
import numpy as np


def main() -> None:
    work, checkpoint, kind = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]), sys.argv[3]
    target = checkpoint / f"ct2-{kind}"
    if not target.exists():
        named = checkpoint / "tokenizer_config.json"  # this older transformers does not know newer class names
        written = json.loads(named.read_text())
        named.write_text(json.dumps({**written, "tokenizer_class": "PreTrainedTokenizerFast"}))
        ctranslate2.converters.TransformersConverter(str(checkpoint)).convert(str(target), quantization=kind)
    generator = ctranslate2.Generator(
        str(target), device="cpu", compute_type=kind, inter_threads=1, intra_threads=work["threads"]
    )
    words = json.loads((target / "vocabulary.json").read_text())
    first: list[float] = []

    def group(requests: list[dict]) -> None:
        start, seen = time.perf_counter(), set()

        def step(result: object) -> bool:
            if result.batch_id not in seen:
                seen.add(result.batch_id)
                first.append(time.perf_counter() - start)
            return False

        longest = max(r["new_tokens"] for r in requests)
        generator.generate_batch(
            [[words[t] for t in r["prompt"]] for r in requests],
            max_length=longest,
            min_length=longest,
            sampling_topk=1,
            include_prompt_in_result=False,
            callback=step,
        )

    requests, size = work["requests"], work["concurrency"]
    group([{**requests[0], "new_tokens": 8}])
    first.clear()
    start = time.perf_counter()
    for place in range(0, len(requests), size):
        group(requests[place : place + size])
    seconds = time.perf_counter() - start
    tokens = sum(r["new_tokens"] for r in requests)
    print(json.dumps({"tokens_per_s": tokens / seconds, "first_token_ms": float(np.median(first)) * 1000}))


main()
