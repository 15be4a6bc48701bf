"""CTranslate2's Translator: WORK.json CHECKPOINT int8|float32.

Groups of `concurrency` texts, as translate_batch takes them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import ctranslate2
from groups import time_groups


def main() -> None:
    work, checkpoint, kind = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]), sys.argv[3]
    target = checkpoint / f"ct2-{kind}"
    if not target.exists():
        named = checkpoint / "tokenizer_config.json"  # this older transformers does not know newer class names
        written = json.loads(named.read_text())
        named.write_text(json.dumps({**written, "tokenizer_class": "PreTrainedTokenizerFast"}))
        ctranslate2.converters.TransformersConverter(str(checkpoint)).convert(str(target), quantization=kind)
    translator = ctranslate2.Translator(
        str(target), device="cpu", compute_type=kind, inter_threads=1, intra_threads=work["threads"]
    )
    file = next(
        path for name in ("shared_vocabulary.json", "source_vocabulary.json") if (path := target / name).exists()
    )
    words = json.loads(file.read_text())
    start = json.loads((target / "config.json").read_text()).get("decoder_start_token")
    prefix = [] if start else [words[json.loads((checkpoint / "config.json").read_text())["decoder_start_token_id"]]]

    def group(requests: list[dict]) -> None:
        count = max(r["new_tokens"] for r in requests)
        results = translator.translate_batch(
            [[words[token] for token in r["source"]] for r in requests],
            target_prefix=[prefix] * len(requests) if prefix else None,
            beam_size=work["beams"],
            max_decoding_length=count,
            min_decoding_length=count,
            max_input_length=0,
        )
        lengths = [len(result.hypotheses[0]) - len(prefix) for result in results]
        if min(lengths) < count - len(prefix):  # a prefix counts as one of the tokens
            raise RuntimeError(f"an answer has {min(lengths)} tokens instead of {count}")

    time_groups(work, group, warm_up_tokens=8)


main()
