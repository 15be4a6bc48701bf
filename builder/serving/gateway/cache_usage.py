"""Read the cache usage of the generating models from Triton. Endpoint pickers choose by it.

Source: the Gateway API's inference extension, docs/proposals/003-model-server-protocol; the name is vLLM's.
"""

from __future__ import annotations

import re
import urllib.request
from http.client import HTTPException

SAYS = "Share of the cache that running requests have, of the model that has the fullest, 0 to 1"
NAME = "vllm:kv_cache_usage_perc"
BELOW = re.compile(r"^build_repo_cache_usage\{[^}]*\} (\S+)$", re.MULTILINE)
ANSWER_S = 1.0


def cache_usage(url: str) -> bytes:
    """Return a gauge in Prometheus' format, from the metrics that Triton publishes at `url`.

    Returns nothing if they cannot be read, or no model has a cache; an absent gauge means that the usage is unknown.
    """
    try:
        with urllib.request.urlopen(url, timeout=ANSWER_S) as response:
            shares = [float(value) for value in BELOW.findall(response.read().decode())]
    except (OSError, HTTPException, ValueError):
        return b""
    return f"# HELP {NAME} {SAYS}\n# TYPE {NAME} gauge\n{NAME} {max(shares)}\n".encode() if shares else b""
