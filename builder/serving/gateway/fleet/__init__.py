"""Serve from several Tritons: find them, check their health, choose one for each request, and retry on another.

`targets` reads the addresses and `members` follows them. `fleet_server` has the state of one Triton, `health` and
`retry_budget` decide from failures, `holders`, `request_work`, `slowness` and `routing` choose a server, and `backend`
sends requests to it. `catalogue` unites the models of all servers, of which `versions` picks one version each. With
models on demand, `on_demand` has them loaded where `placement` says, by an `on_demand_server` within its memory. The
deciding modules do no I/O and take the time as an argument.
"""
