"""Cohere's own client."""

from __future__ import annotations

import cohere
from checking import WORK, check, report


@check("rerank")
def _() -> None:
    api = cohere.ClientV2("none", base_url=WORK["gateway"])
    answer = api.rerank(model="ranks", query="passport", documents=["The town hall", "The soup"], top_n=1)
    assert len(answer.results) == 1


report()
