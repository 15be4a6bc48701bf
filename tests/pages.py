"""Checks of generated HTML pages: they are self-contained, and charts and tables show all of their text."""

from __future__ import annotations

import re
from html import unescape
from html.parser import HTMLParser


def stands_alone(html: str) -> None:
    """Check that every tag is closed, and that the page loads no resource and runs no script."""
    open_tags: list[str] = []

    class Reader(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            self.handle_startendtag(tag, attrs)
            if tag != "meta":
                open_tags.append(tag)

        def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            assert tag not in ("script", "link", "img", "iframe")
            assert not {"src", "href", "onload"} & {name for name, _ in attrs}

        def handle_endtag(self, tag: str) -> None:
            assert open_tags.pop() == tag

    Reader().feed(html)
    assert open_tags == []
    assert "url(" not in html
    assert "NaN" not in html
    assert not re.search(r"https?://", html)


GLYPH_WIDTH = 7.6  # average width of 12 px text in DejaVu Sans, which is wider than most fonts
TEXT = re.compile(r'<text x="([\d.-]+)" y="([\d.-]+)" text-anchor="(\w+)">(?:<title>[^<]*</title>)?([^<]*)</text>')
ANCHORED = {"start": 0.0, "middle": 0.5, "end": 1.0}


def shows_every_text(html: str) -> None:
    """Check that the text of every chart lies inside its picture, and that every table is in a scrolling box."""
    for picture in re.findall(r"<svg.*?</svg>", html, re.DOTALL):
        width, height = map(float, re.findall(r'viewBox="0 0 (\d+) (\d+)"', picture)[0])
        texts = TEXT.findall(picture)
        assert len(texts) == picture.count("<text")
        for x, y, anchor, text in texts:
            taken = GLYPH_WIDTH * len(unescape(text))
            left = float(x) - ANCHORED[anchor] * taken
            assert left >= 0, text
            assert left + taken <= width, text
            assert 9 <= float(y) <= height - 3, text
    assert html.count("<table") == len(re.findall(r'<div class="scroll" [^>]*tabindex="0"><table', html))
    assert re.search(r"\.scroll \{[^}]*overflow-x: auto", html)
