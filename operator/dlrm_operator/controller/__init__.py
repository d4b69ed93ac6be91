"""Observe, decide, apply: what runs the pure reconcile against a cluster."""
