"""Tests of the page at /: one file that loads nothing, with labels, and a form that a phone shows first.

test_page_script.py runs its script in a browser.
"""

from __future__ import annotations

import re
from html.parser import HTMLParser

from tests.serving.gateway.requests import fetch

VOID = ("meta", "input")


class Elements(HTMLParser):
    """The elements of a page in their order, each with its attributes and the ids of those around it."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[tuple[str, str]] = []
        self.found: list[tuple[str, dict[str, str | None], list[str]]] = []
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs), [identity for _, identity in self.open if identity]))
        if tag not in VOID:
            self.open.append((tag, dict(attrs).get("id") or ""))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop()[0] == tag

    def ids(self) -> list[str]:
        return [identity for _, attributes, _ in self.found if (identity := attributes.get("id"))]


def page() -> str:
    return b"".join(fetch("/").pieces).decode()


def test_page_loads_nothing_from_other_origins() -> None:
    answer = fetch("/")
    assert answer.status == 200
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    html = b"".join(answer.pieces).decode()
    assert not re.search(r"https?:|src=|@import|url\(|innerHTML|insertAdjacentHTML", html)
    for tag, attributes, _ in Elements(html).found:
        assert tag not in ("link", "img", "iframe")
        assert not [name for name in attributes if name.startswith("on") or name == "style"]


def test_page_names_its_parts() -> None:
    html = page()
    elements = Elements(html)
    ids = elements.ids()
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'\$\("([\w-]+)"\)', html)) <= set(ids), "the script finds what it looks for"
    labelled = {attributes["for"] for tag, attributes, _ in elements.found if tag == "label"}
    assert {attributes["id"] for tag, attributes, _ in elements.found if tag == "input"} == labelled == {"find", "key"}
    assert all("type" in attributes for tag, attributes, _ in elements.found if tag == "button")
    assert set(re.findall(r'aria-labelledby="([\w-]+)"|href="#([\w-]+)"', html)) <= {("name", ""), ("", "work")}
    for part in ('lang="en"', "<title>", 'role="log" aria-live="polite"', 'role="status"', ":focus-visible"):
        assert part in html


def test_page_shows_the_form_before_the_list_of_models_on_a_phone() -> None:
    """The list, its search and the key fold away; the form has its own state and the keys that send."""
    elements = Elements(page())
    around = {attributes["id"]: outer for _, attributes, outer in elements.found if attributes.get("id")}
    assert all("picker" in around[identity] for identity in ("models", "find", "found", "key", "again"))
    assert "form" in around["status"], "beside the button, where a conversation of any length leaves it in sight"
    order = elements.ids()
    assert order.index("picker") < order.index("form") < order.index("answer")
    (send,) = [attributes for _, attributes, _ in elements.found if attributes.get("id") == "send"]
    assert "Control+Enter" in str(send["aria-keyshortcuts"])
