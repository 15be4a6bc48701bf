"""Metrics for operators: tokens, padding and engine calls on Triton's own /metrics."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
import urllib.request
from collections.abc import Callable

import numpy as np
import pytest

from builder.common.samples import TEXTS
from builder.repository.config.render import templates
from builder.serving.client.client import Client
from builder.serving.gateway.app import make_app
from builder.serving.gateway.catalogue import Catalogue
from builder.serving.gateway.metrics import Metrics
from builder.serving.gateway.settings import GatewaySettings
from builder.serving.server.triton import TritonServer
from tests.serving.gateway.asgi import ask
from tests.serving.gateway.fake_triton import FakeTriton


def _metrics(server: TritonServer, model: str) -> dict[str, float]:
    url = f"http://{server.host}:{server.ports.metrics}/metrics"
    text = urllib.request.urlopen(url, timeout=300).read().decode()
    return {
        m[1]: float(m[2]) for m in re.finditer(rf'build_repo_(\w+)_total{{model="{model}",version="1"}} (\S+)', text)
    }


def test_metrics_count_tokens_padding_and_engine_calls(server: TritonServer, client: Callable[[str], Client]) -> None:
    served = client("pooled")
    time.sleep(1.1)
    served.ask({"text_input": "a"})
    before = _metrics(server, "pooled")
    rows = np.array([[text.encode()] for text in TEXTS[:26]], dtype=object)
    served.ask_tensors({"text_input": rows})
    time.sleep(1.1)
    served.ask({"text_input": "a"})
    after = _metrics(server, "pooled")
    grown = {name: after[name] - before[name] for name in after}
    assert grown["tokens"] > 500
    assert 0 < grown["padding_tokens"] < 0.1 * grown["tokens"]
    assert 2 <= grown["engine_calls"] < 20


@pytest.mark.parametrize("name", ["pooled", "writes"])
def test_metrics_have_the_load_time_of_each_model(
    name: str, server: TritonServer, client: Callable[[str], Client]
) -> None:
    """Dashboards count loads with changes(build_repo_loaded_timestamp_seconds[1h])."""
    client(name)
    url = f"http://{server.host}:{server.ports.metrics}/metrics"
    text = urllib.request.urlopen(url, timeout=300).read().decode()
    match = re.search(rf'build_repo_loaded_timestamp_seconds{{model="{name}",version="1"}} (\S+)', text)
    assert match is not None
    assert 0 < time.time() - float(match[1]) < 86_400


def test_gateway_metrics_have_the_cache_usage(server: TritonServer, client: Callable[[str], Client]) -> None:
    """An endpoint picker reads it from the gateway. Send requests until the usage rises, then wait until it falls."""
    url = f"http://{server.host}:{server.ports.metrics}/metrics"
    app = make_app(GatewaySettings(triton_metrics=url), FakeTriton(), None, models=Catalogue(FakeTriton()))

    def usage() -> float:
        text = b"".join(asyncio.run(ask(app, "/metrics", None)).pieces).decode()
        match = re.search(r"^vllm:kv_cache_usage_perc (\S+)$", text, re.MULTILINE)
        assert match is not None
        return float(match[1])

    def asking() -> None:
        served = Client(f"{server.host}:{server.ports.grpc}", "writes")
        while not seen.is_set():
            served.ask({"text_input": "a", "max_tokens": 40, "ignore_eos": True})

    client("writes").ask({"text_input": "a", "max_tokens": 1})
    seen, deadline = threading.Event(), time.monotonic() + 300
    threads = [threading.Thread(target=asking) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        while (most := usage()) == 0 and time.monotonic() < deadline:
            time.sleep(0.1)
    finally:
        seen.set()
        for thread in threads:
            thread.join()
    assert 0 < most <= 1
    while usage() > 0 and time.monotonic() < deadline:
        time.sleep(0.1)
    assert usage() == 0


def test_dashboard_metrics_are_exposed_by_triton_or_the_gateway(
    server: TritonServer, client: Callable[[str], Client]
) -> None:
    """GPU metrics are excluded, because Triton exposes them only on a machine with a GPU."""
    client("pooled").ask({"text_input": "a"})
    url = f"http://{server.host}:{server.ports.metrics}/metrics"
    text = urllib.request.urlopen(url, timeout=300).read().decode()
    known = set(re.findall(r"^# TYPE (\S+)", text + Metrics().text().decode(), re.MULTILINE))
    dashboard = json.loads((templates() / "monitoring" / "dashboard.json").read_text())
    named = {
        name.removesuffix("_bucket")
        for panel in dashboard["panels"]
        for target in panel["targets"]
        for name in re.findall(r"\b(?:nv_|build_repo_|vllm:|te_)\w+", target["expr"])
    }
    assert len(named) > 15
    assert {name for name in named - known if not name.startswith("nv_gpu_")} == set()
