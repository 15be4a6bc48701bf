"""A Ray Serve application: replicas that each run a Triton, behind the gateway's own routes.

    client -> Ray's HTTP proxy (proxy.py) -> the gateway's application -> replicas.py -> replica.py -> Triton

A model is loaded where a request for it arrives, and requests go where their model is loaded (Ray's multiplexing); what
a killed replica or node was asked is asked again elsewhere, unless its answer has begun. Needs the extra `ray`.
"""
