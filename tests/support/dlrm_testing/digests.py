"""The digest of a snapshot's state, which a trainer's own has to be after a restore."""

from __future__ import annotations

from dlrm_checkpointer.codec.digest import state_digest, table_digest
from dlrm_checkpointer.read.catalog import walk_table
from dlrm_checkpointer.read.restore import Snapshot


def snapshot_digest(snapshot: Snapshot) -> str:
    """Return the digest of the state in a snapshot (``digest.state_digest``); reads every object."""
    tables = []
    for table in snapshot.meta.tables:
        digest = table_digest(block.digest(*block.fill()) for block in walk_table(snapshot, table))
        tables.append((table.name, digest))
    return state_digest(tables, snapshot.dense())
