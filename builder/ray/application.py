"""The import_path `builder.ray.application:application` of a stored serve.yaml."""

from builder.clusters.ray.application import application

__all__ = ["application"]
