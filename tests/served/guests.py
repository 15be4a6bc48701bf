"""Temporary models on a running Triton, from the files of a built model, without a change to its repository.

Triton takes the files and the configuration of a model with the order to load it (server, docs/protocol/
extension_model_repository.md, Load).
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from google.protobuf.json_format import MessageToJson
from tritonclient.grpc import InferenceServerClient

from builder.repository.config.render import parse
from builder.serving.server.triton import TritonServer
from tests.served.patience import comes_about

LOAD_S = 300


@contextlib.contextmanager
def guest(
    server: TritonServer,
    entry: Path,
    name: str,
    files: Mapping[str, bytes],
    parameters: Mapping[str, str],
    instances: int = 1,
    **serving: object,
) -> Iterator[None]:
    """Load the model `name`: version 1 of `entry` with more `files`, and `serving` as changed fields of serving.json.

    After the block, the model must be completely unloaded.
    """
    version = entry / "1"
    own = {str(path.relative_to(version)): path.read_bytes() for path in version.rglob("*") if path.is_file()}
    own["serving.json"] = json.dumps({**json.loads(own["serving.json"]), **serving}).encode()
    config = parse((entry / "config.pbtxt").read_text("utf-8"), name)
    config.name, config.instance_group[0].count = name, instances
    for key, value in parameters.items():
        config.parameters[key].string_value = value
    told = MessageToJson(config, preserving_proto_field_name=True, indent=None)
    with InferenceServerClient(server.url) as control:
        sent = {f"file:1/{path}": content for path, content in {**own, **files}.items()}
        control.load_model(name, config=told, files=sent, client_timeout=LOAD_S)
        try:
            yield
        finally:
            control.unload_model(name, client_timeout=LOAD_S)
    assert comes_about(lambda: _states(server, name) <= {"UNAVAILABLE"}), _states(server, name)


def _states(server: TritonServer, name: str) -> set[str]:
    return {model.state for model in server.models() if model.name == name}
