"""The rules of `build-repo check`, from their own texts."""

from __future__ import annotations

from itertools import groupby

from builder.repository.lint.rule import Rule, all_rules


def rules() -> str:
    """Return a section for each topic, and in it one for each rule."""
    topics = sorted(all_rules(), key=lambda rule: (_first(rule), rule.code))
    parts = []
    for topic, rules_of_it in groupby(topics, key=lambda rule: rule.topic):
        parts.append(f"## {topic}")
        parts.extend(part for rule in rules_of_it for part in _rule(rule))
    return "\n\n".join(parts)


def _first(rule: Rule) -> str:
    """Return the first code of the rule's topic."""
    return min(other.code for other in all_rules() if other.topic == rule.topic)


def _rule(rule: Rule) -> list[str]:
    heading = f"### {rule.code}: {rule.check.__name__.replace('_', ' ')}"
    source = [f"Source: {rule.source}."] if rule.source else []
    examples = [_block("wrong", rule.wrong), _block("right", rule.right)]
    return [heading, f"*{rule.severity.value}.* {rule.what}", rule.why, *source, *examples]


def _block(title: str, text: str) -> str:
    return f'```text title="{title}"\n{text}\n```'
