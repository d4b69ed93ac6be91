"""Offer the manifests to spoil and the API server that refuses them."""

from dlrm_testing.api_server import good, server
from dlrm_testing.dimensions import dimension_is_built

__all__ = ["dimension_is_built", "good", "server"]
