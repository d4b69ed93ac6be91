"""The shared-memory folder through which cuts go from a pod's ranks to its checkpointer."""
