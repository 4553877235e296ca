"""Prometheus metrics of the engine in this process, on a port of their own."""

from __future__ import annotations

from prometheus_client import REGISTRY, start_http_server

from app import ports


def serve(host: str) -> str:
    """Start serving and answer the URL; it is also in the worker's registry record."""
    port = ports.reserve(host)
    start_http_server(port, addr=host, registry=REGISTRY)
    return f"http://{host}:{port}/metrics"
