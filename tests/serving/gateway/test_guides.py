"""Guided decoding: the forms that requests name, as the model gets them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.serving.gateway.fake_triton import FakeTriton
from tests.serving.gateway.requests import fetch, gateway

SCHEMA = {"type": "object"}


NAMED = {"type": "object", "properties": {"a": {"type": "string"}}}


@pytest.mark.parametrize(
    ("asked_for", "guide"),
    [
        ({"response_format": {"type": "json_object"}}, {"json_object": True}),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
            {"json_schema": SCHEMA},
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": NAMED}}},
            {"json_schema": {**NAMED, "additionalProperties": False}},
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {**NAMED, "allOf": []}}}},
            {"json_schema": {**NAMED, "allOf": []}},
        ),
        ({"guided_json": NAMED}, {"json_schema": NAMED}),
        ({"guided_json": '{"type": "object"}'}, {"json_schema": SCHEMA}),
        ({"guided_json": SCHEMA}, {"json_schema": SCHEMA}),
        ({"guided_regex": "a+"}, {"regex": "a+"}),
        ({"structured_outputs": {"json": NAMED}}, {"json_schema": NAMED}),
        ({"structured_outputs": {"json": '{"type": "object"}', "regex": None}}, {"json_schema": SCHEMA}),
        ({"structured_outputs": {"regex": "a+"}}, {"regex": "a+"}),
        ({"structured_outputs": {"grammar": "start: /a/"}}, {"grammar": "start: /a/"}),
        ({"structured_outputs": {"choice": ["a", "b"]}}, {"choice": ["a", "b"]}),
        ({"structured_outputs": {"json_object": True}}, {"json_object": True}),
        ({"guided_choice": ["a", "b"]}, {"choice": ["a", "b"]}),
    ],
)
def test_guides_are_sent_in_the_model_format(asked_for: dict[str, Any], guide: dict[str, Any]) -> None:
    triton = FakeTriton()
    assert fetch("/v1/completions", {"model": "guided", "prompt": "a", **asked_for}, gateway(triton)).status == 200
    assert json.loads(triton.requests[0]["guide"][0]) == guide


@pytest.mark.parametrize(
    ("asked_for", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}, "response_format"),
        ({"response_format": "json"}, "response_format"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": '{"const": NaN}'}, "guided_json"),
        ({"guided_regex": ["a"]}, "guided_regex"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "json": "{}"}}, "structured_outputs"),
        ({"structured_outputs": {"regex": ["a"]}}, "structured_outputs.regex"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": "json"}, "structured_outputs"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_regex"),
        ({"tools": [{"type": "function"}]}, "tools"),
    ],
)
def test_invalid_guides_are_refused(asked_for: dict[str, Any], param: str) -> None:
    refused = fetch("/v1/completions", {"model": "guided", "prompt": "a", **asked_for})
    assert (refused.status, refused.error["param"]) == (400, param)
