"""Bytes that snapshots write and take, against full ones in fp32: a part of ``benchmarks.snapshots``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from benchmarks.loopback import Service
from benchmarks.measure import Line, Pairs, tell
from benchmarks.metered_store import MeteredStore
from benchmarks.saved_job import SavedJob, tables_of
from benchmarks.touched import TouchedRows, Trace
from dlrm_api.checkpoint import Bits, PolicyName
from dlrm_stores import ObjectStore

DIM = 64
TABLES = 4
INTERVALS = 40
"""Snapshots of a life; the first is full."""
EXPONENT = 1.05
SHARES = (0.2, 0.26, 0.3)
BITS: tuple[Bits, ...] = (8, 2)
CHECKED = 3
"""Snapshots that full-fp32 is really written for."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Describe a line about bytes."""

    bits: Bits
    policy: PolicyName
    trace: str
    dim: int = DIM
    against: str = "full-fp32"
    benchmark: ClassVar[str] = "snapshots"

    @property
    def shown(self) -> dict[str, Any]:
        """See ``measure.Described``."""
        return {"bits": self.bits, "policy": self.policy, "dim": self.dim, "trace": self.trace}


@dataclass(frozen=True, kw_only=True)
class Life:
    """Hold what a job's snapshots took."""

    written_bytes: int
    peak_bytes: int
    full_bytes: int
    measured: dict[str, Any]

    def lines(self, setting: Setting) -> Iterator[Line]:
        """Bytes written, and the most that was in the store, against full-fp32.

        That writes all of the model at each cut, and keeps the old one until the new one is valid.
        """
        theirs = {
            "write_bytes": (self.written_bytes, self.measured["intervals"] * self.full_bytes),
            "capacity_bytes": (self.peak_bytes, 2 * self.full_bytes),
        }
        for metric, (ours, full) in theirs.items():
            times_less = {"times_less": full / ours}
            yield Line(setting=setting, metric=metric, pairs=Pairs([ours], [full]), measured=times_less | self.measured)


def lines(service: Service, quick: bool) -> Iterator[Line]:
    """Lives of a job with each share of touched rows and each number of bits; first full-fp32 itself, for a check.

    Args:
        service: where snapshots are put.
        quick: few rows and snapshots.
    """
    rows, intervals = (4_000, 8) if quick else (50_000, INTERVALS)
    store = service.store("bytes")
    check = Setting(bits=32, policy="full", trace=Trace(exponent=EXPONENT, share=SHARES[0]).name)
    yield from live(store, check.bits, check.policy, SHARES[0], rows, CHECKED).lines(check)
    for bits in BITS:
        for share in SHARES:
            trace = Trace(exponent=EXPONENT, share=share)
            tell(f"{bits} bits, {trace.name}: {intervals} snapshots of {TABLES * rows:,} rows")
            setting = Setting(bits=bits, policy="intermittent", trace=trace.name)
            yield from live(store, bits, "intermittent", share, rows, intervals).lines(setting)


def live(store: ObjectStore, bits: Bits, policy: PolicyName, share: float, rows: int, intervals: int) -> Life:
    """Make the snapshots of one job, one after the other, in a store of nobody else; it is empty afterwards."""
    metered = MeteredStore(store)
    trace = Trace(exponent=EXPONENT, share=share)
    touched: list[float] = []
    again: list[float] = []
    kinds: list[str] = []
    with SavedJob(metered, tables_of(TABLES, rows, DIM), bits, policy, seed=1) as job:
        draws = {table.name: TouchedRows(trace, rows, seed) for seed, table in enumerate(job.tables)}
        before = {name: np.zeros(rows, bool) for name in draws}
        for interval in range(intervals):
            if interval:
                for name, draw in draws.items():
                    ids = draw.draw()
                    job.touch(name, ids)
                    touched.append(len(ids) / rows)
                    if interval > 1:
                        again.append(float(before[name][ids].mean()))
                    before[name][:] = False
                    before[name][ids] = True
            job.cut()
            last = job.status.progress.last_snapshot
            kinds.append(last.kind if last else "")
        full_bytes, dense_bytes = job.full_bytes, job.full_bytes - job.table_bytes
    store.delete_all([info.key for info in store.list("")])
    return Life(
        written_bytes=metered.written_bytes,
        peak_bytes=metered.peak_bytes,
        full_bytes=full_bytes,
        measured={
            "intervals": intervals,
            "full_at": [number for number, kind in enumerate(kinds) if kind == "full"],
            "touched_share": float(np.mean(touched)),
            "touched_in_the_interval_before": float(np.mean(again)),
            "lookups_per_row": trace.lookups(rows) / rows,
            "tables": TABLES,
            "rows": rows,
            "row_optimizer": "rowwise-adagrad",
            "dense_bytes": dense_bytes,
        },
    )
