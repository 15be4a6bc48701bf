"""Traffic of the benchmarks, English texts of mixed length, the same for every side; and the counters of a server."""

from __future__ import annotations

import urllib.request
from collections.abc import Callable

import numpy as np

from builder.common.samples import TEXTS
from builder.serving.server.triton import TritonServer

WORDS = " ".join(TEXTS).split()


def mixed_texts(tokens: Callable[[str], int], count: int = 256, most: int = 256) -> list[str]:
    """Return `count` texts of 8 to `most` tokens: log-normal lengths with a mean near 48 words, seed 0."""
    generator = np.random.default_rng(0)
    texts: list[str] = []
    while len(texts) < count:
        words = int(np.clip(generator.lognormal(mean=3.5, sigma=0.8), 6, 240))
        start = int(generator.integers(0, len(WORDS) - words))
        text = " ".join(WORDS[start : start + words])
        if 8 <= tokens(text) <= most:
            texts.append(text)
    return texts


def counters(server: TritonServer) -> dict[str, float]:
    """Return the counters of the emitted models from /metrics, by name; empty for a layout that does not count."""
    url = f"http://{server.host}:{server.ports.metrics}/metrics"
    lines = urllib.request.urlopen(url).read().decode().splitlines()
    return {line.split("{")[0]: float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("build_repo_")}
