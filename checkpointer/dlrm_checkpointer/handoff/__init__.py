"""Hand cuts from a pod's ranks to its checkpointer through a directory in shared memory."""
