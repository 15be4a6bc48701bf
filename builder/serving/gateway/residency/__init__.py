"""Loading on demand: a repository may hold more models than memory, and a model is loaded at its first request.

`offered` lists the models, `needs` estimates their memory, `processes` measures it; `residents` decides what is loaded,
by leases and last use, and `loading` does it; `backend` stands between a request and Triton.
"""
