"""Rules, one module per topic. A module here is found by itself; its docstring heads its rules on docs/rules.md."""
