"""The liveness model: a request of it shows that a server answers inferences.

It lies in a model repository of its own, so that no listing, check or build of the user's repository meets it. A server
whose heap was corrupted calls itself ready for hours while each gRPC call waits for ever (server, issue 8841), so its
health is no evidence. Metadata is none either: it passes through neither scheduler nor backend. A request of a user's
model waits behind those that are queued, for longer than any useful deadline. This model has a queue and a process of
its own, and answers at once on a server that is only busy, or loads models.
"""

from __future__ import annotations

from pathlib import Path

from tritonclient.grpc import service_pb2

NAME = "build_repo_liveness"
METHOD = "/inference.GRPCInferenceService/ModelInfer"
FOLDER = Path(__file__).parent


def liveness_files() -> dict[str, str]:
    """Return the files of its repository by their paths."""
    places = {"config.pbtxt": f"{NAME}/config.pbtxt", "model.py": f"{NAME}/1/model.py"}
    return {path: (FOLDER / name).read_text("utf-8") for name, path in places.items()}


def put_liveness(repository: Path) -> Path:
    """Write the repository, and return it."""
    for path, text in liveness_files().items():
        (repository / path).parent.mkdir(parents=True, exist_ok=True)
        (repository / path).write_text(text, "utf-8")
    return repository


def liveness_request() -> service_pb2.ModelInferRequest:
    """Return the request that a server has to answer."""
    request = service_pb2.ModelInferRequest(model_name=NAME, raw_input_contents=[b"\1"])
    request.inputs.add(name="asked", datatype="INT8", shape=[1])
    return request


def ask_command(address: str, deadline_s: int) -> str:
    """Return a shell command that succeeds if the server at a gRPC `address` answers the request.

    Over gRPC as the gateway asks, with curl: stock containers carry no gRPC client. A gRPC message is a byte for its
    compression, four for its length, and the protobuf: github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md.
    """
    message = liveness_request().SerializeToString(deterministic=True)
    body = "".join(f"\\{byte:03o}" for byte in b"\0" + len(message).to_bytes(4, "big") + message)
    return (
        f"printf '{body}' | curl --silent --http2-prior-knowledge --max-time {deadline_s} --data-binary @- "
        "--header 'content-type: application/grpc' --header 'te: trailers' --dump-header - --output /dev/null "
        f"http://{address}{METHOD} | grep --quiet '^grpc-status: 0'"
    )
