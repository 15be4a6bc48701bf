"""The markers of reasoning in a chat template are recognised."""

from __future__ import annotations

import pytest

from builder.checkpoints.chat_template import thinking
from builder.runtime.contract import Chat, Thinking

CUTS = "{% for m in messages %}{{ m.content.split('</think>')[-1] }}{% endfor %}<think>\\n"  # as DeepSeek R1's


@pytest.mark.parametrize(
    ("template", "special", "wanted"),
    [
        (CUTS, [], Thinking("<think>", "</think>")),
        (
            "[THINK]{{ messages[0].thinking }}[/THINK]",
            ["[/THINK]"],
            Thinking("[THINK]", "[/THINK]", True),
        ),
        ("{{ messages[0].content }}", ["</think>"], None),
    ],
)
def test_thinking_marks_come_from_the_template(template: str, special: list[str], wanted: Thinking | None) -> None:
    assert thinking(Chat(template), special) == wanted
    assert thinking(Chat("{{ messages[0].content }}", tool_template=template), special) == wanted
