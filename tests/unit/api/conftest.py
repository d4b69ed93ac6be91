"""Offer the manifests to spoil and the API server that refuses them."""

from dlrm_testing.api_server import good, server

__all__ = ["good", "server"]
