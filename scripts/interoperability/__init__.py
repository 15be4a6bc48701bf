"""Clients that people have, each in an environment of its own, against the gateway and Triton: `scripts/interop`.

Each file of clients/ is a program: the addresses and the names of the models in (JSON, its one argument), one line of
JSON out: {"checks": {what was done: "passed", or why not}}. They import nothing of this project.
"""
