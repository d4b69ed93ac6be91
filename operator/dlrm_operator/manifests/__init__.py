"""Kubernetes objects of a job as plain data."""

from __future__ import annotations

from typing import Any

Manifest = dict[str, Any]
