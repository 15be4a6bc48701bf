"""The rules, one module a topic. A module here is found by itself; its docstring heads its rules on docs/rules.md."""
