"""Loading on demand: more models in a repository than fit into memory, loaded when somebody asks for them.

offered says which models there are, needs what one takes, processes what Triton takes; residents decides what is
loaded, by leases and last use, and loading does it; backend puts that between a request and Triton.
"""
