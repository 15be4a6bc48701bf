"""Both ways on the real server: what has an error does not load, and what has none does."""

from __future__ import annotations

from pathlib import Path

import pytest
from tritonclient.grpc import InferenceServerClient
from tritonclient.utils import InferenceServerException

from builder.lint import lint
from builder.lint.findings import Severity
from builder.serve.triton import running
from tests.lint.cases import CASES

LONG_S, HANGS_S = 60, 2  # a model that loads takes well under a second


@pytest.mark.slow
def test_what_check_passes_loads_and_what_the_server_refuses_check_refuses(tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    CASES["whole"].write(repository / "whole")
    with running(repository) as server, InferenceServerClient(server.url) as client:
        for name, case in CASES.items():
            case.write(repository / name)
        errors = {finding.model: str(finding) for finding in lint(repository) if finding.severity is Severity.ERROR}
        refused = {}
        for name in sorted(CASES, key=lambda name: CASES[name].hangs):
            try:
                client.load_model(name, client_timeout=HANGS_S if CASES[name].hangs else LONG_S)
            except InferenceServerException as error:
                refused[name] = error.message()
    assert {name: reason for name, reason in refused.items() if name not in errors} == {}, "check passes them"
    assert {name: found for name, found in errors.items() if name not in refused} == {}, "the server loads them"
