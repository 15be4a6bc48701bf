"""What every page that the product writes must be."""

from __future__ import annotations

import re
from html.parser import HTMLParser


def stands_alone(html: str) -> None:
    """Every tag is closed, and nothing is fetched or run."""
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
