"""Deployment of a repository: write the files that an orchestrator runs.

contents reads the models of the repository and computes the resources of a replica, and each file in targets writes
both for one orchestrator. pod and objects know Kubernetes; nothing here talks to a cluster.
"""
