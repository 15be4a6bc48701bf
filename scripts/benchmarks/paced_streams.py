"""A server without a model, whose streams of `/v1/completions` have a token at fixed times: for load_programs.

python -m scripts.benchmarks.paced_streams PORT
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import AsyncIterator

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

FIRST_S, BETWEEN_S = 0.050, 0.020  # as a small model on two cores takes


async def complete(request: Request) -> StreamingResponse:
    body = await request.json()
    return StreamingResponse(events(int(body["max_tokens"])), media_type="text/event-stream")


async def events(tokens: int) -> AsyncIterator[str]:
    """Yield a token at each time of the plan, then the usage and the end."""
    clock = asyncio.get_running_loop()
    start = clock.time()
    for index in range(tokens):
        await asyncio.sleep(start + FIRST_S + index * BETWEEN_S - clock.time())
        yield _event(choices=[{"index": 0, "text": " a", "finish_reason": None}])
    yield _event(choices=[{"index": 0, "text": "", "finish_reason": "length"}])
    usage = {"prompt_tokens": 1, "completion_tokens": tokens, "total_tokens": tokens + 1}
    yield _event(choices=[], usage=usage)
    yield "data: [DONE]\n\n"


def _event(**fields: object) -> str:
    answer = {"id": "cmpl-0", "object": "text_completion", "created": 0, "model": "writes", **fields}
    return f"data: {json.dumps(answer)}\n\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("port", type=int)
    options = parser.parse_args()
    app = Starlette(routes=[Route("/v1/completions", complete, methods=["POST"])])
    uvicorn.run(app, host="127.0.0.1", port=options.port, log_level="warning")


if __name__ == "__main__":
    main()
