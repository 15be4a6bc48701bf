"""Serve a retrieval library with FastAPI and a dynamic batcher: PORT LIBRARY KIND FOLDER PRECISION THREADS.

The batcher gives the model all requests that wait, at most MAX_REQUESTS, in one thread, so that the library's own
threads do not compete. KIND is embed, rerank or late. It runs in the environment of the library.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import retrieval_libraries
import uvicorn
from fastapi import FastAPI

MAX_REQUESTS = 32


class Batcher:
    """Answer requests in batches of those that wait."""

    def __init__(self, answer: Callable[[list[Any]], list[Any]]) -> None:
        self.answer = answer
        self.waiting: asyncio.Queue = asyncio.Queue()
        self.thread = ThreadPoolExecutor(1)

    async def ask(self, request: Any) -> Any:
        future = asyncio.get_running_loop().create_future()
        self.waiting.put_nowait((request, future))
        return await future

    async def work(self) -> None:
        while True:
            batch = [await self.waiting.get()]
            while len(batch) < MAX_REQUESTS and not self.waiting.empty():
                batch.append(self.waiting.get_nowait())
            requests = [request for request, _ in batch]
            try:
                answers = await asyncio.get_running_loop().run_in_executor(self.thread, self.answer, requests)
            except Exception as error:
                for _, future in batch:
                    future.set_exception(error)
                continue
            for (_, future), answer in zip(batch, answers, strict=True):
                future.set_result(answer)


def main() -> None:
    port, library, kind, folder, precision, threads = sys.argv[1:]
    batcher = Batcher(retrieval_libraries.LIBRARIES[library](kind, Path(folder), precision, int(threads)))

    @asynccontextmanager
    async def lifespan(app: FastAPI):
        task = asyncio.create_task(batcher.work())
        yield
        task.cancel()

    app = FastAPI(lifespan=lifespan)

    async def answer(request: dict) -> dict:
        return {"answer": await batcher.ask(request["text"] if kind == "embed" else request)}

    app.post(f"/{kind}")(answer)
    uvicorn.run(app, host="127.0.0.1", port=int(port), log_level="warning")


main()
