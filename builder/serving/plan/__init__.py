"""From a machine and a load to the numbers of a deployment, with the arithmetic: what fits and which load it can serve.

`needs` says what memory a model takes and how fast it was measured; `encoder` and `generating` do the arithmetic of one
model, `machine` that of all of them together; `lines` holds their results.
"""
