"""Kubernetes objects of a job as plain data."""

from typing import Any

Manifest = dict[str, Any]
