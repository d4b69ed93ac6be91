"""The validating admission webhook. Nothing else depends on it."""
