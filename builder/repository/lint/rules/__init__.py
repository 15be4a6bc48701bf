"""Rules, one module per topic, found by itself. A docstring heads its rules on docs/reference/rules.md."""
