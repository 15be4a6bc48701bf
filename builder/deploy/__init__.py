"""From a repository to what an orchestrator runs: contents says what the repository holds, sizing what a replica of it
takes, and each file in targets writes it down for one orchestrator.

pod and objects know Kubernetes; nothing here talks to a cluster.
"""
