"""A job of one rank that does nothing but change rows and make cuts, and its sidecar."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from benchmarks.scratch import SHARED_MEMORY, Scratch
from dlrm_api.checkpoint import Bits, CheckpointSpec, PolicyName
from dlrm_checkpointer.format.attempts import claim_attempt
from dlrm_checkpointer.handoff.inbox import Inbox
from dlrm_checkpointer.handoff.writer import HandoffWriter
from dlrm_checkpointer.sidecar import Sidecar, SidecarTasks
from dlrm_checkpointer.status import Status
from dlrm_checkpointer.types import CutMeta, ShardRows, SnapshotName, TableMeta
from dlrm_checkpointer.write.policy import ChainPolicy
from dlrm_checkpointer.write.retention import RetentionPolicy
from dlrm_stores import ObjectStore

INTERVAL_S = 1_800.0
PATIENCE_S = 300.0
DENSE_SHARE = 0.001
"""Bytes of the dense part, with its optimizer's state, over those of rows and theirs: as of a model of Criteo's shape
with 26 tables of 400,000 rows x 64."""


def tables_of(count: int, rows: int, dim: int) -> tuple[TableMeta, ...]:
    """Tables under row-wise Adagrad."""
    scale = float(np.float32(rows**-0.5))
    return tuple(
        TableMeta(name=f"table-{number}", rows=rows, dim=dim, seed=7, scale=scale, column_blocks=((0, dim),))
        for number in range(count)
    )


class SavedJob:
    """Rows in memory, and a sidecar in a thread that stores them; a context manager.

    Every row has been updated before the first cut, which therefore holds all of them: weights are normal, of a size
    of the row's own around that of a trained embedding.

    Args:
        store: empty.
        tables: of the model.
        bits: of stored weights.
        policy: of the chains.
        seed: of all that is random.
    """

    def __init__(
        self, store: ObjectStore, tables: Sequence[TableMeta], bits: Bits, policy: PolicyName, seed: int
    ) -> None:
        self.tables, self._source = tuple(tables), np.random.default_rng(seed)
        self.rows = {table.name: self._drawn(table) for table in tables}
        self.state = {table.name: self._source.random((table.rows, 1), np.float32) for table in tables}
        self._changed_at = {table.name: np.ones(table.rows, np.int64) for table in tables}
        values = round(DENSE_SHARE * self.table_bytes / 8)
        self.dense: dict[str, NDArray[Any]] = {name: self._source.random(values, np.float32) for name in ("w", "opt")}
        self.step = 1
        self.attempt = claim_attempt(store, None, "")
        self._scratch = Scratch(SHARED_MEMORY)
        self._writer = HandoffWriter(self._scratch.path, 0, None)
        self._inbox, self.status = Inbox(self._scratch.path, range(1)), Status()
        sidecar = Sidecar(self._inbox, store, self.status, _duties(bits, policy))
        self._stop = threading.Event()
        self._thread = threading.Thread(target=sidecar.run, args=(self._stop,), daemon=True)
        self._thread.start()

    def _drawn(self, table: TableMeta) -> NDArray[np.float32]:
        sizes = np.exp(self._source.normal(-4, 1, (table.rows, 1))).astype(np.float32)
        return self._source.standard_normal((table.rows, table.dim), np.float32) * sizes

    @property
    def table_bytes(self) -> int:
        """Return the bytes of all rows in fp32, with their state."""
        return sum(self.rows[table.name].nbytes + self.state[table.name].nbytes for table in self.tables)

    @property
    def full_bytes(self) -> int:
        """Return the bytes of a snapshot without increments and codes."""
        return self.table_bytes + sum(array.nbytes for array in self.dense.values())

    def touch(self, name: str, ids: NDArray[np.int64]) -> None:
        """Update rows of a table, in the step that the next cut is of."""
        rows, state = self.rows[name], self.state[name]
        rows[ids] += self._source.standard_normal((len(ids), rows.shape[1]), np.float32) * np.float32(0.002)
        state[ids] += self._source.random((len(ids), 1), np.float32)
        self._changed_at[name][ids] = self.step + 1

    def cut(self) -> None:
        """Hand over what changed, and wait until it is committed.

        Raises:
            TimeoutError: it never was.
        """
        self.hand_over()
        if not self._writer.wait_idle(PATIENCE_S):
            raise TimeoutError(f"step {self.step} is not committed: {self.status.progress.store_error}")

    def hand_over(self) -> None:
        """Make a cut of the next step."""
        self.step += 1
        parent = self._writer.begin(self.attempt)
        meta = CutMeta(
            step=self.step,
            samples=self.step,
            world_size=1,
            attempt=self.attempt,
            parent=parent,
            time=INTERVAL_S * self.step,
            model={"tables": [table.to_json() for table in self.tables]},
        )
        owned = [table.whole() for table in self.tables]
        self._writer.hand_over(meta, self._changed(parent), self.dense, owned=owned, timeout_s=PATIENCE_S)

    def _changed(self, parent: SnapshotName | None) -> Iterator[ShardRows]:
        for table in self.tables:
            ids = np.flatnonzero(self._changed_at[table.name] > (parent.step if parent else 0))
            rows, state = self.rows[table.name][ids], self.state[table.name][ids]
            yield ShardRows(shard=table.whole(), row_ids=ids, rows=rows, state=state)

    def settle(self) -> None:
        """Wait until the sidecar has ended, and so has removed what it need not keep."""
        self._writer.close("done")
        self._stop.set()
        self._thread.join()

    def __enter__(self) -> Self:
        """Nothing more to do."""
        return self

    def __exit__(self, *_: object) -> None:
        """End the sidecar, give the memory back."""
        self.settle()
        self._inbox.close()
        self._scratch.close()


def _duties(bits: Bits, policy: PolicyName) -> SidecarTasks:
    """Return the settings of a job that keeps one snapshot, with defaults otherwise."""
    spec = CheckpointSpec(uri="file:///unused")
    chains = ChainPolicy(
        name=policy,
        base_every_s=spec.base_every,
        max_chain=spec.max_chain,
        max_restore_s=spec.max_restore_time,
        restore_bytes_per_s=float(spec.restore_bandwidth),
    )
    return SidecarTasks(
        bits=bits,
        expected_restores=0,
        chains=chains,
        retention=RetentionPolicy(keep_last=1),
        single_pod=True,
        grace_s=PATIENCE_S,
    )
