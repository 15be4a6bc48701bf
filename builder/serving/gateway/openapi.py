"""Generate the gateway's OpenAPI document from the table that also defines its routes.

Source: https://spec.openapis.org/oas/v3.1.0
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from builder.common.distribution import own_version
from builder.serving.gateway.endpoint import Handler
from builder.serving.gateway.errors import ApiError, ErrorBody, openai_error

REFERENCE = "#/components/schemas/{model}"
STREAMS = "text/event-stream"


@dataclass(frozen=True)
class ApiRoute:
    """One route. `schema` validates its body, None if it takes none; `bodies` are documented in its place.

    `errors`: the shapes of its errors, the route's own first. `documented`: False for an internal route.
    """

    method: str
    path: str
    handler: Handler
    schema: type[BaseModel] | None = None
    errors: tuple[ErrorBody, ...] = (openai_error,)
    bodies: tuple[type[BaseModel], ...] = ()
    documented: bool = True


def document(apis: Iterable[ApiRoute]) -> dict[str, Any]:
    components: dict[str, Any] = {}
    paths: dict[str, Any] = {}
    for api in apis:
        if api.documented:
            paths.setdefault(api.path, {})[api.method.lower()] = _operation(api, components)
    bearer = {"type": "http", "scheme": "bearer"}
    return {
        "openapi": "3.1.0",
        "info": {"title": "build-repo gateway", "version": own_version()},
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": {"key": bearer}},
        "security": [{}, {"key": []}],  # needed if the gateway has keys
    }


def _operation(api: ApiRoute, components: dict[str, Any]) -> dict[str, Any]:
    bodies = [_schema(body, components) for body in api.bodies or ((api.schema,) if api.schema else ())]
    content: dict[str, Any] = {"application/json": {}} if api.method == "POST" else {"*/*": {}}
    if any("stream" in body.get("properties", {}) for body in bodies):
        content[STREAMS] = {}
    shapes = [_shape(shape(ApiError(400, ""))) for shape in api.errors]
    error = {"application/json": {"schema": _any_of(shapes)}}
    operation: dict[str, Any] = {
        "operationId": f"{api.method.lower()}{re.sub('[^a-z0-9]+', '_', api.path)}",
        "summary": (api.handler.__doc__ or "").split("\n")[0].split(": ", 1)[-1],
        "responses": {
            "200": {"description": "the answer", "content": content},
            "default": {"description": "why there is none", "content": error},
        },
    }
    names = re.findall(r"{(\w+)}", api.path)
    if names:
        string = {"type": "string"}
        operation["parameters"] = [{"name": n, "in": "path", "required": True, "schema": string} for n in names]
    if bodies:
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": _any_of(bodies)}}}
    return operation


def _schema(body: type[BaseModel], components: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a body; its definitions go to the components, which all bodies share."""
    schema = body.model_json_schema(ref_template=REFERENCE)
    for name, part in schema.pop("$defs", {}).items():
        if components.setdefault(name, part) != part:
            raise TypeError(f"two schemas are called {name}: rename one of the classes")
    return schema


def _any_of(schemas: list[dict[str, Any]]) -> dict[str, Any]:
    return schemas[0] if len(schemas) == 1 else {"anyOf": schemas}


def _shape(example: Any) -> dict[str, Any]:
    """Return the schema of an error, from an example without details."""
    if isinstance(example, dict):
        return {"type": "object", "properties": {k: _shape(v) for k, v in example.items()}, "required": list(example)}
    return {"type": ["string", "null"]} if example is None else {"type": "string"}
