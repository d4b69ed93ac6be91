"""Compile a sidecar's loops while its image is built: the lives of small jobs, their snapshots read back.

numba keeps machine code by the types and the layout of what a loop is given; only the sidecar's own ways give it all.
"""

import tempfile
import threading
from pathlib import Path
from typing import get_args

import numpy as np

from dlrm_api.checkpoint import Bits
from dlrm_checkpointer.codec.rows import decode_rows
from dlrm_checkpointer.format.attempts import claim_attempt
from dlrm_checkpointer.handoff.inbox import Inbox
from dlrm_checkpointer.handoff.writer import HandoffWriter
from dlrm_checkpointer.read.restore import newest_snapshot
from dlrm_checkpointer.sidecar import Sidecar, SidecarTasks
from dlrm_checkpointer.status import Status
from dlrm_checkpointer.types import CutMeta, ShardRows, TableMeta
from dlrm_checkpointer.write.policy import ChainPolicy
from dlrm_checkpointer.write.retention import RetentionPolicy
from dlrm_stores import StoreOptions, open_store

TABLE = TableMeta(name="rows", rows=300, dim=8, seed=1, scale=0.5, column_blocks=((0, 8),))
CUTS = 3
"""A base, an increment, and one that is merged with it."""


def hand_over(writer: HandoffWriter, attempt: int, step: int) -> None:
    """Half of the table's rows, as one rank's cut."""
    draw = np.random.default_rng(step)
    ids = np.flatnonzero(draw.random(TABLE.rows) < 0.5).astype(np.int64)
    rows = draw.normal(0, 0.1, (len(ids), TABLE.dim)).astype(np.float32)
    piece = ShardRows(shard=TABLE.whole(), row_ids=ids, rows=rows, state=np.ones((len(ids), 1), np.float32))
    parent = writer.begin(attempt)
    model = {"tables": [TABLE.to_json()]}
    meta = CutMeta(step=step, samples=step, world_size=1, attempt=attempt, parent=parent, model=model)
    writer.hand_over(meta, [piece], {"w": np.zeros(2, np.float32)}, owned=[TABLE.whole()], timeout_s=20)


def live(folder: Path, bits: Bits) -> None:
    """One job: cuts, each committed by a sidecar that then ends, and its newest snapshot read."""
    store = open_store((folder / "store").as_uri(), StoreOptions())
    attempt = claim_attempt(store, None, "warming")
    chains = ChainPolicy(name="one-shot", base_every_s=None, max_chain=24, max_restore_s=None, restore_bytes_per_s=1e8)
    rule = RetentionPolicy(keep_last=1, keep_every_s=None)
    duties = SidecarTasks(bits=bits, expected_restores=3, chains=chains, retention=rule, single_pod=True, grace_s=120)
    ended = threading.Event()
    ended.set()
    for step in range(1, CUTS + 1):
        writer = HandoffWriter(folder / "handoff", 0, None)
        hand_over(writer, attempt, step)
        writer.close("done")
        inbox = Inbox(folder / "handoff", range(1))
        code = Sidecar(inbox, store, Status(), duties, None).run(ended)
        inbox.close()
        assert code == 0, code
    snapshot, reasons = newest_snapshot(store)
    assert not reasons, reasons
    assert snapshot is not None
    assert sum(len(decode_rows(piece).row_ids) for _, piece in snapshot.shard_codes([TABLE.whole()]))


if __name__ == "__main__":
    for bits in get_args(Bits):
        with tempfile.TemporaryDirectory() as name:
            live(Path(name), bits)
