"""Liveness model: a request of it shows that a server answers inferences.

It lies in a model repository of its own, so that no listing, check or build of the user's repository includes it. A
server whose heap was corrupted reports that it is ready for hours while each gRPC call hangs (server, issue 8841), so
its health proves nothing. Neither does metadata, which passes through neither scheduler nor backend. A request of a
user's model waits behind those that are queued, for longer than any useful deadline. This model has a queue and a
process of its own, and answers at once on a server that is only busy, or loads models.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from tritonclient.grpc import service_pb2

NAME = "build_repo_liveness"
METHOD = "/inference.GRPCInferenceService/ModelInfer"
REPOSITORY = Path(__file__).parent / "repository"
FILES = (f"{NAME}/config.pbtxt", f"{NAME}/1/model.py")


def put_liveness(repository: Path) -> Path:
    """Write the repository of the model, and return it."""
    for file in FILES:
        (repository / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / file, repository / file)
    return repository


def liveness_request() -> service_pb2.ModelInferRequest:
    """Return the request that a server has to answer."""
    request = service_pb2.ModelInferRequest(model_name=NAME, raw_input_contents=[b"\1"])
    request.inputs.add(name="asked", datatype="INT8", shape=[1])
    return request


def send_command(address: str, deadline_s: int) -> str:
    """Return a shell command that sends the request to a gRPC `address` and prints the headers of the answer.

    Over gRPC as the gateway asks, with curl: stock containers carry no gRPC client. Its status is 28 when no answer has
    come in time. A message of gRPC is a byte for its compression, four for its length, and the protobuf:
    https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md
    """
    message = liveness_request().SerializeToString(deterministic=True)
    body = "".join(f"\\{byte:03o}" for byte in b"\0" + len(message).to_bytes(4, "big") + message)
    return (
        f"printf '{body}' | curl --silent --http2-prior-knowledge --max-time {deadline_s} --data-binary @- "
        "--header 'content-type: application/grpc' --header 'te: trailers' --dump-header - --output /dev/null "
        f"http://{address}{METHOD}"
    )


def ask_command(address: str, deadline_s: int) -> str:
    """Return a shell command that succeeds if the server at a gRPC `address` answers the inference."""
    return f"{send_command(address, deadline_s)} | grep --quiet '^grpc-status: 0'"
