"""The digest of a snapshot's state, which a trainer's own has to be after a restore."""

from __future__ import annotations

from dlrm_checkpointer.coding.digest import combine, state_digest
from dlrm_checkpointer.reading.restore import Snapshot
from dlrm_checkpointer.reading.table_blocks import walk_table


def snapshot_digest(snapshot: Snapshot) -> str:
    """The digest of the state that restoring the snapshot gives (``digest.state_digest``); reads every object."""
    tables = []
    for table in snapshot.meta.tables:
        digest = combine(block.digest(*block.fill()) for block in walk_table(snapshot, table))
        tables.append((table.name, digest))
    return state_digest(tables, snapshot.dense())
