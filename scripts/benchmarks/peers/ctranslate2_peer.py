"""CTranslate2: WORK.json CHECKPOINT TYPE, with TYPE int8 or float32.

Groups of `concurrency` prompts, as its generate_batch takes them; only the tokens a request asked for count.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import ctranslate2
from clock import Clock


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

    def group(clock: Clock, named: list[tuple[int, dict]]) -> None:
        requests = [request for _, request in named]
        left = [request["new_tokens"] for request in requests]
        for name, _ in named:
            clock.send(name)

        def step(result: object) -> bool:
            if left[result.batch_id]:
                clock.tokens(named[result.batch_id][0])
                left[result.batch_id] -= 1
            return False

        longest = max(left)
        generator.generate_batch(
            [[words[t] for t in r["prompt"]] for r in requests],
            max_length=longest,
            min_length=longest,
            sampling_topk=1,
            include_prompt_in_result=False,
            callback=step,
        )

    requests, size = list(enumerate(work["requests"])), work["concurrency"]
    group(Clock(), [(0, {**requests[0][1], "new_tokens": 8})])
    clock = Clock()
    for start in range(0, len(requests), size):
        group(clock, requests[start : start + size])
    print(json.dumps(clock.figures()))


main()
