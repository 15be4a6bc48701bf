"""Keep the queues of one Triton full with requests of other clients, which know no other server."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from tritonclient.grpc import service_pb2

from builder.common.samples import TEXTS
from builder.runtime.fields import Field
from builder.serving.gateway.errors import ApiError
from builder.serving.gateway.tensors import add_tensor
from builder.serving.gateway.triton import Triton

CLIENTS = 64  # of each model
PAUSE_S = 0.1  # of a client that was refused
TOKENS = 16
TEXT = Field("text_input", "TYPE_STRING")


@contextmanager
def flooding(url: str, encoder: str, decoder: str) -> Iterator[None]:
    """Ask both models of the Triton at `url` all the time. Raises RuntimeError if no request to one was refused."""
    refused, stopping = Counter[str](), threading.Event()
    flood = threading.Thread(target=lambda: asyncio.run(_flood(url, encoder, decoder, refused, stopping)))
    flood.start()
    try:
        yield
    finally:
        stopping.set()
        flood.join()
    if set(refused) != {encoder, decoder}:
        raise RuntimeError(f"the queues of {url} were not full: {dict(refused)} refused")


async def _flood(url: str, encoder: str, decoder: str, refused: Counter[str], stopping: threading.Event) -> None:
    triton, text = Triton(url), " ".join(TEXTS[:8])

    async def client(model: str) -> None:
        while not stopping.is_set():
            request = service_pb2.ModelInferRequest(model_name=model)
            add_tensor(request, TEXT, [text], (1, 1) if model == encoder else (1,))
            try:
                if model == encoder:
                    await triton.infer(request)
                    continue
                add_tensor(request, Field("max_tokens", "TYPE_INT32"), [TOKENS], (1,))
                async for _ in triton.stream(request):
                    pass
            except ApiError as error:
                refused[model] += error.code == "queue_full"
                await asyncio.sleep(PAUSE_S)

    try:
        await asyncio.gather(*(client(model) for model in (encoder, decoder) for _ in range(CLIENTS)))
    finally:
        await triton.close()
