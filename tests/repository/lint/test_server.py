"""Lint and the real server agree: models with an error do not load, and the others do."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from tritonclient.grpc import InferenceServerClient
from tritonclient.utils import InferenceServerException

from builder.repository.lint import lint
from builder.repository.lint.findings import Severity
from builder.serving.server.triton import TritonServer, running
from tests.repository.lint.cases import CASES

STARTS = 10
AT_ONCE = 4  # models that are loading: most of the time of one goes by while its process starts
LONG_S, HANGS_S = 600, 2  # a model loads in well under a second if nothing else runs
LOST = "StatusCode.UNAVAILABLE"  # of a server that ended, and of some that go on


@pytest.mark.slow
def test_check_and_triton_agree_on_every_case(tmp_path: Path) -> None:
    refused = _refused(tmp_path)
    errors = {finding.model: str(finding) for finding in lint(tmp_path / "0") if finding.severity is Severity.ERROR}
    assert {name: reason for name, reason in refused.items() if name not in errors} == {}, "check passes them"
    loaded = {name for name, case in CASES.items() if case.loads}  # whose requests fail instead
    assert errors.keys() - refused.keys() == loaded, "the server loads them"


def _refused(folder: Path) -> dict[str, str]:
    """Return the server's message for each model that it does not load.

    Triton 24.10 ends now and then, seen at warm_up_of_many: the rest is then asked of another server.
    """
    errors: dict[str, str | None] = {}
    for start in range(STARTS):
        left = [name for name in CASES if name not in errors]
        if not left:
            break
        repository = folder / str(start)
        CASES["whole"].write(repository / "whole")
        with running(repository) as server, InferenceServerClient(server.url) as client:
            for name, case in CASES.items():
                case.write(repository / name)
            for names, at_once in _turns(left):
                with ThreadPoolExecutor(at_once) as pool:
                    answers = list(pool.map(partial(_load, client), names))
                if any(answer and answer.startswith(LOST) for answer in answers) and _ended(server, client):
                    break
                errors |= dict(zip(names, answers, strict=True))
            server.process.kill()  # loaded models need not be unloaded, one after the other
    assert errors.keys() == CASES.keys(), f"the server ended {STARTS} times"
    return {name: reason for name, reason in errors.items() if reason is not None}


def _turns(names: Sequence[str]) -> Iterator[tuple[Sequence[str], int]]:
    """Yield models that load together, and how many at once; then those that load alone, and those that hang."""
    alone = [name for name in names if CASES[name].alone or CASES[name].hangs]
    yield [name for name in names if name not in alone], AT_ONCE
    yield from (([name], 1) for name in sorted(alone, key=lambda name: CASES[name].hangs))


def _load(client: InferenceServerClient, name: str) -> str | None:
    """Return the reason why the server does not load a model; None if it does."""
    try:
        client.load_model(name, client_timeout=HANGS_S if CASES[name].hangs else LONG_S)
    except InferenceServerException as error:
        return f"{error.status()}: {error.message()}"
    return None


def _ended(server: TritonServer, client: InferenceServerClient) -> bool:
    """Return True if the server has ended, or is about to; one that goes on says so."""
    while server.process.poll() is None:
        with contextlib.suppress(InferenceServerException):
            if client.is_server_live():
                return False
        time.sleep(0.05)
    return True
