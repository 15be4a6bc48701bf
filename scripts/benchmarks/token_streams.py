"""Closed loop of clients that generate text over one gRPC stream of Triton, and the times of their tokens."""

from __future__ import annotations

import queue
from collections.abc import Sequence
from typing import Any

import grpc
import numpy as np
from tritonclient.grpc import service_pb2, service_pb2_grpc

from scripts.benchmarks.generation_work import WorkItem
from scripts.benchmarks.peers.clock import Clock


def load(url: str, work: Sequence[WorkItem], concurrency: int) -> dict[str, float]:
    """Run clients over one gRPC stream; return the figures of `Clock`."""
    outgoing: queue.SimpleQueue[Any] = queue.SimpleQueue()
    waiting = list(enumerate(work))

    def send() -> None:
        index, item = waiting.pop(0)
        clock.send(str(index))
        outgoing.put(_request(str(index), item))

    with grpc.insecure_channel(url) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        clock = Clock()
        for _ in range(min(concurrency, len(waiting))):
            send()
        left = len(work)
        for message in stub.ModelStreamInfer(iter(outgoing.get, None)):
            if message.error_message:
                raise RuntimeError(message.error_message)
            response = message.infer_response
            names = [output.name for output in response.outputs]
            raw = response.raw_output_contents[names.index("num_output_tokens")]
            clock.tokens(response.id, int(np.frombuffer(raw, np.uint32)[0]))
            if "completion_tokens" in names:
                left -= 1
                if waiting:
                    send()
                if not left:
                    break
        outgoing.put(None)
    return clock.figures()


def _request(identity: str, item: WorkItem) -> Any:
    request = service_pb2.ModelInferRequest(model_name="model", id=identity)
    text = item.text.encode()
    values = (
        ("text_input", "BYTES", len(text).to_bytes(4, "little") + text),
        ("max_tokens", "INT32", np.int32(item.new_tokens).tobytes()),
        ("ignore_eos", "BOOL", b"\x01"),
        ("stream", "BOOL", b"\x01"),
        ("return_num_output_tokens", "BOOL", b"\x01"),
    )
    for name, kind, raw in values:
        request.inputs.add(name=name, datatype=kind, shape=[1])
        request.raw_input_contents.append(raw)
    return request
