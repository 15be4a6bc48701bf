"""Ray Serve application: replicas that each run a Triton, behind the gateway's own routes.

    client -> Ray's HTTP proxy (proxy.py) -> the gateway's application -> replicas.py -> replica.py -> Triton

A model is loaded where a request for it arrives, and requests go where their model is loaded (Ray's multiplexing). If a
replica or node is killed, its requests are sent again to another, unless their answers have begun. Needs the extra
`ray`.
"""
