"""The RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH `builder.ray.proxy.middlewares` of a stored rayservice.yaml."""

from builder.clusters.ray.proxy import middlewares

__all__ = ["middlewares"]
