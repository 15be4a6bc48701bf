"""Compute the numbers of a deployment for a machine and a load: what fits, and which load it can serve.

`needs` gives a model's memory and measured speed; `encoder` and `generating` do the arithmetic of one model, `machine`
that of all of them together; `lines` holds their results.
"""
