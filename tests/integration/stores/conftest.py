"""Offer the fixtures that stores and checkpointer share."""

from dlrm_testing.checkpointer.fixtures import (
    all_tables,
    clock,
    dying,
    few_rows,
    files,
    new_model,
    new_pod,
    small_tables,
    store,
    to_disk,
    train_and_commit,
)

__all__ = [
    "all_tables",
    "clock",
    "dying",
    "few_rows",
    "files",
    "new_model",
    "new_pod",
    "small_tables",
    "store",
    "to_disk",
    "train_and_commit",
]
