"""Voyage's own client."""

from __future__ import annotations

import voyageai
from checking import WORK, check, report

client = voyageai.Client(api_key="none", base_url=f"{WORK['gateway']}/v1")
TEXTS = ["The town hall", "The soup"]


@check("rerank")
def _() -> None:
    (best,) = client.rerank("passport", TEXTS, "ranks", top_k=1).results
    assert best.document in TEXTS


report()
