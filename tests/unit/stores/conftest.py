"""Fixtures of the checkpointer's tests that stores need too."""

from dlrm_testing.checkpointer.fixtures import files, new_model, new_pod, store

__all__ = ["files", "new_model", "new_pod", "store"]
