"""Test the script of the page at / in Chromium; skipped where Chromium or websockets is not installed."""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import time
import urllib.request
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Any

import pytest
from tritonclient.grpc import service_pb2

from builder.serving.gateway.backend import Metadata
from builder.serving.gateway.errors import ApiError
from builder.serving.gateway.tensors import Output
from tests.serving.gateway.fake_triton import FakeTriton
from tests.serving.gateway.retrieval import add_models
from tests.serving.gateway.serving import served

CHROMIUM = shutil.which("chromium")
WAIT_S = 60.0
PHONE = {"width": 390, "height": 844, "deviceScaleFactor": 3, "mobile": True}
DESK = {"width": 1280, "height": 900, "deviceScaleFactor": 1, "mobile": False}

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")


class Failing(FakeTriton):
    """Refuses to stream while `refusal` is set."""

    refusal = ""

    async def stream(
        self, request: service_pb2.ModelInferRequest, metadata: Metadata = ()
    ) -> AsyncGenerator[dict[str, Output], None]:
        if self.refusal:
            raise ApiError(400, self.refusal)
        async for response in super().stream(request, metadata):
            yield response


class Browser:
    """A tab that is driven over Chromium's DevTools protocol."""

    def __init__(self, connection: Any) -> None:
        self.connection, self._ids = connection, itertools.count(1)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol and return its result."""
        number = next(self._ids)
        self.connection.send(json.dumps({"id": number, "method": method, "params": parameters}))
        while True:
            message = json.loads(self.connection.recv(timeout=WAIT_S))
            if message.get("id") == number:
                assert "error" not in message, message
                return dict(message["result"])

    def evaluate(self, expression: str) -> Any:
        """Return the value of an expression in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait_for(self, expression: str) -> None:
        end = time.monotonic() + WAIT_S
        while not self.evaluate(expression):
            assert time.monotonic() < end, (expression, self.evaluate("document.body.innerText"))
            time.sleep(0.05)

    def open(self, url: str, screen: dict[str, Any]) -> None:
        """Show the page with its list of models."""
        self.call("Emulation.setDeviceMetricsOverride", **screen)
        self.call("Page.navigate", url=url)
        self.wait_for(f"location.href.startsWith({url!r}) && document.querySelectorAll('#models .model').length > 3")

    def choose(self, name: str) -> None:
        self.evaluate(
            "[...document.querySelectorAll('#models .model')].find(button => button.firstChild.textContent === "
            f"{name!r}).click()"
        )
        self.wait_for(f"document.getElementById('name').textContent === {name!r}")

    def type(self, text: str) -> None:
        """Replace the question."""
        self.evaluate("document.querySelector('#fields textarea').focus()")
        self.evaluate("document.querySelector('#fields textarea').select()")
        self.call("Input.insertText", text=text)

    def press_enter(self, control: bool = False) -> None:
        key = {"key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 13, "modifiers": 2 if control else 0}
        self.call("Input.dispatchKeyEvent", type="rawKeyDown", **key)
        self.call("Input.dispatchKeyEvent", type="keyUp", **key)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    client = pytest.importorskip("websockets.sync.client")
    profile = tmp_path_factory.mktemp("chromium")
    assert CHROMIUM is not None
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
    command = [CHROMIUM, *options, "--remote-debugging-port=0", f"--user-data-dir={profile}", "about:blank"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            with client.connect(_debugger(profile), max_size=None) as connection:
                yield Browser(connection)
        finally:
            process.terminate()


def _debugger(profile: Path) -> str:
    """Return the address of the first tab, as soon as Chromium listens."""
    port, end = profile / "DevToolsActivePort", time.monotonic() + WAIT_S
    while not port.is_file() or not port.read_text():
        assert time.monotonic() < end, "Chromium does not start"
        time.sleep(0.05)
    with urllib.request.urlopen(f"http://127.0.0.1:{port.read_text().split()[0]}/json/list", timeout=WAIT_S) as answer:
        return str(next(tab["webSocketDebuggerUrl"] for tab in json.load(answer) if tab["type"] == "page"))


BOX = "document.querySelector('#fields textarea').value"
TURNS = "[...document.querySelectorAll('.turn:not([hidden]) .words')].map(words => words.textContent)"


def test_page_moves_a_question_into_the_conversation_at_control_enter(browser: Browser) -> None:
    with served(FakeTriton()) as url:
        browser.open(url, DESK)
        browser.choose("writes")
        browser.type("How far is Oslo?")
        browser.press_enter()
        assert browser.evaluate(TURNS) == [], "Enter alone begins a line"
        browser.press_enter(control=True)
        browser.wait_for(f"{TURNS}.length === 2")
        assert browser.evaluate(BOX) == ""
        assert browser.evaluate(TURNS)[0].strip() == "How far is Oslo?"
        browser.wait_for("document.getElementById('status').textContent.startsWith('Answered in')")


def test_page_shows_a_failure_below_its_question_and_sends_again(browser: Browser) -> None:
    triton = Failing()
    triton.refusal = "this model is out of tea"
    with served(triton) as url:
        browser.open(url, DESK)
        browser.choose("writes")
        browser.type("How far is Oslo?")
        browser.press_enter(control=True)
        browser.wait_for("document.querySelector('.failed') !== null")
        assert "out of tea" in browser.evaluate("document.querySelector('.turn.you + .failed').textContent")
        triton.refusal = ""
        browser.evaluate("document.querySelector('.failed button').click()")
        browser.wait_for(f"{TURNS}.length === 2")
        assert browser.evaluate("document.querySelector('.failed') === null")


def test_page_searches_models_by_name_and_task(browser: Browser) -> None:
    shown = "[...document.querySelectorAll('#models li:not([hidden])')].map(entry => entry.dataset.words)"
    with served(FakeTriton()) as url:
        browser.open(url, DESK)
        every = browser.evaluate(shown)
        browser.evaluate("document.getElementById('find').focus()")
        browser.call("Input.insertText", text="similar")
        found = browser.evaluate(shown)
        assert found == [words for words in every if "similar" in words]
        assert 0 < len(found) < len(every)
        browser.press_enter()
        assert browser.evaluate("document.getElementById('name').textContent").lower() == found[0].split()[0]


def test_page_shows_the_form_first_on_a_phone(browser: Browser) -> None:
    with served(FakeTriton()) as url:
        browser.open(url, PHONE)
        browser.wait_for("!document.getElementById('form').hidden")
        assert browser.evaluate("document.getElementById('picker').open") is False
        top, bottom = "document.getElementById('form').getBoundingClientRect().top", "innerHeight"
        assert browser.evaluate(top) < browser.evaluate(bottom)
        assert browser.evaluate("document.documentElement.scrollWidth") <= PHONE["width"], "nothing runs past the edge"


ANSWER = "document.getElementById('answer')"


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("late", ["Passports are renewed", "The soup needs salt."]),
        ("hybrid", ["Passports are renewed", "The soup needs salt."]),
        ("ranks", ["Score", "The soup needs salt."]),
        ("sparse", ["Weight", "0.500"]),
        ("extracts", ["Ada Lovelaceperson", "lived in London."]),
        ("fills", ["Ada Lovelaceperson", "lived in London."]),
        ("embeds", ["Similarity to the first", "The soup needs salt."]),
    ],
)
def test_page_tries_each_kind_of_retrieval_model(
    model: str, expected: list[str], browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served(add_models(monkeypatch)) as url:
        browser.open(url, DESK)
        browser.choose(model)
        browser.evaluate("document.getElementById('form').requestSubmit()")
        browser.wait_for("/^(Answered|Stopped)/.test(document.getElementById('status').textContent)")
        text = browser.evaluate(f"{ANSWER}.textContent")
        assert all(part in text for part in expected), text
        assert browser.evaluate("document.documentElement.scrollWidth") <= DESK["width"]


def test_page_colours_tokens_by_their_similarity_to_the_query(
    browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every letter is a token of the stand-in: those of the query are as similar as can be."""
    with served(add_models(monkeypatch)) as url:
        browser.open(url, DESK)
        browser.choose("late")
        browser.evaluate("document.getElementById('field-query').value = 'ab'")
        browser.evaluate("document.getElementById('field-documents').value = 'za\\nab'")
        browser.evaluate("document.getElementById('form').requestSubmit()")
        browser.wait_for(f"{ANSWER}.querySelectorAll('p').length === 2")
        first = browser.evaluate(f"[...{ANSWER}.querySelectorAll('p')].map(one => one.textContent)")
        assert first == ["2.00 ab", "1.99 za"]
        tokens = browser.evaluate(f"[...{ANSWER}.querySelectorAll('p:last-child mark')].map(one => Number(one.title))")
        assert tokens[1] == 1
        assert tokens[0] < 0
