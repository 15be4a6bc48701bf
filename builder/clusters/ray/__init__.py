"""Replicas of Triton that Ray places, restarts and scales, behind gateways that talk to them directly.

    client -> gateway (a process, gateway.py) -> Triton (of a replica, replica.py)

Ray Serve runs the replicas and sends them no requests. Each publishes the address of its Triton (registry.py), and each
gateway follows these addresses and tells how many requests run on each, by which Ray scales (scaling.py). Needs the
extra `ray`.
"""
