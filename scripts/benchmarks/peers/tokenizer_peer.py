"""transformers' GPT-2 tokeniser written in Python, which transformers 5 no longer has: TEXT.txt TOKENIZER.json.

Prints the milliseconds for the text with the tokeniser's cache of words, and with that cache emptied before each text.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

from transformers import GPT2Tokenizer


def main() -> None:
    text, state = Path(sys.argv[1]).read_text(), json.loads(Path(sys.argv[2]).read_text())["model"]
    with tempfile.TemporaryDirectory() as folder:
        vocabulary, merges = Path(folder) / "vocab.json", Path(folder) / "merges.txt"
        vocabulary.write_text(json.dumps(state["vocab"]))
        pairs = [pair if isinstance(pair, str) else " ".join(pair) for pair in state["merges"]]
        merges.write_text("#version: 0.2\n" + "\n".join(pairs) + "\n")
        tokenizer = GPT2Tokenizer(str(vocabulary), str(merges), unk_token="!", bos_token="!", eos_token="!")

    def timed(forget: bool) -> float:
        times = []
        for _ in range(30):
            if forget:
                tokenizer.cache.clear()
            start = time.perf_counter()
            tokenizer(text)
            times.append(time.perf_counter() - start)
        return statistics.median(times[5:]) * 1000

    print(json.dumps({"without_cache_ms": timed(True), "with_cache_ms": timed(False)}))


main()
