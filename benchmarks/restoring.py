"""How fast a rank's tables come back from the store, and with how much memory: a part of ``benchmarks.snapshots``."""

from __future__ import annotations

import hashlib
import multiprocessing
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from benchmarks.loopback import Service
from benchmarks.measure import Line, Pairs, memory, tell
from benchmarks.metered_store import MeteredStore
from benchmarks.saved_job import SavedJob, tables_of
from dlrm_api.checkpoint import Bits
from dlrm_api.model import TableSpec
from dlrm_checkpointer.format import chunk
from dlrm_checkpointer.format.manifest import ChunkEntry, ObjectEntry
from dlrm_checkpointer.read.fetch import gets_at_once
from dlrm_checkpointer.read.restore import Snapshot, newest_snapshot
from dlrm_checkpointer.types import TableMeta
from dlrm_trainer.embedding.changes import DirtyPart, DirtyRows
from dlrm_trainer.embedding.checkpoint import ResidentPart

DIM = 64
TABLES = 4
TOUCHED = 0.26
"""Of the rows, between a full snapshot and an increment; evenly drawn."""
ANSWER_S, CONNECTION_BYTES_PER_S = 0.03, 90e6
"""How long a store far away takes to answer, and how fast each of its answers comes then."""
KINDS: tuple[tuple[Bits, str], ...] = ((32, "full"), (8, "full"), (2, "full"), (8, "increment"))


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Describe a line about restoring."""

    bits: Bits
    kind: str
    rows: int
    dim: int = DIM
    against: str = "bare-read"
    benchmark: ClassVar[str] = "snapshots"

    @property
    def shown(self) -> dict[str, Any]:
        """See ``measure.Described``."""
        return {"bits": self.bits, "kind": self.kind, "dim": self.dim, "tables": TABLES, "rows": self.rows}


def lines(service: Service, quick: bool) -> Iterator[Line]:
    """Restores of each kind of snapshot against bare reads of the same objects.

    Args:
        service: where the snapshots are put.
        quick: few rows.
    """
    rows, repeats = (10_000, 2) if quick else (500_000, 7)
    for bits, kind in KINDS:
        tell(f"restoring {bits} bits, {kind}: {TABLES * rows:,} rows")
        prefix = f"restoring/{bits}-{kind}"
        save(service, prefix, bits, kind, rows)
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as child:
            pairs, measured = child.submit(measure, service, prefix, repeats).result()
        setting = Setting(bits=bits, kind=kind, rows=rows)
        yield Line(setting=setting, metric="restore_bytes_per_s", pairs=pairs, measured=measured)


def save(service: Service, prefix: str, bits: Bits, kind: str, rows: int) -> None:
    """Make a full snapshot, or also an increment over it."""
    with SavedJob(service.store(prefix), tables_of(TABLES, rows, DIM), bits, "one-shot", seed=3) as job:
        job.cut()
        if kind == "increment":
            random = np.random.default_rng(4)
            for table in job.tables:
                job.touch(table.name, np.flatnonzero(random.random(table.rows) < TOUCHED))
            job.cut()


def measure(service: Service, prefix: str, repeats: int) -> tuple[Pairs, dict[str, Any]]:
    """Restore and read in turn, in a process that does nothing else; rates count the bytes of objects."""
    snapshot, _ = newest_snapshot(service.store(prefix), check=None)
    assert snapshot is not None, "it was saved just now"
    parts = [part_of(table) for table in snapshot.meta.tables]
    bare = BareRead(service, prefix, snapshot.objects)
    size = sum(entry.bytes for entry in snapshot.objects)
    before = reset_peak()
    restore(snapshot, parts)
    extra = memory("VmHWM") - before
    bare.run()
    pairs, began = Pairs(), time.process_time()
    restore(snapshot, parts)
    spent = time.process_time() - began
    bare.run()
    bare_spent = time.process_time() - began - spent
    for repeat in range(repeats):
        if repeat % 2 == 0:
            ours, theirs = timed(restore, snapshot, parts), timed(bare.run)
        else:
            theirs, ours = timed(bare.run), timed(restore, snapshot, parts)
        pairs.add(ours, theirs)
    far = Snapshot(FarStore(snapshot.store), snapshot.chain)
    far_s = min(timed(restore, far, parts) for _ in range(2))
    torch.set_num_threads(1)
    rates, decoding = pairs.inverted(size), decode_rate(snapshot, parts)
    lower = min(float(np.median(rates.theirs)), decoding)
    return rates, {
        "object_bytes": size,
        "objects": len(snapshot.objects),
        "row_bytes": sum(part.weight.nbytes + part.state.nbytes for part in parts),
        "decoded_on_one_core_bytes_per_s": decoding,
        "of_the_lower": float(np.median(rates.ours)) / lower,
        "cpu_ms": 1_000 * spent,
        "bare_read_cpu_ms": 1_000 * bare_spent,
        "peak_extra_bytes": extra,
        "parallel_gets": gets_at_once(snapshot.objects),
        "from_far_bytes_per_s": size / far_s,
    }


def part_of(table: TableMeta) -> ResidentPart:
    """Memory of a table's rows, touched."""
    return ResidentPart(
        table=TableSpec(name=table.name, rows=table.rows, dim=table.dim),
        shard=table.whole(),
        weight=torch.full((table.rows, table.dim), 1.0),
        state=torch.full((table.rows, table.state_width), 1.0),
        dirty=DirtyPart(DirtyRows([table.rows]), 0),
    )


def restore(snapshot: Snapshot, parts: Sequence[ResidentPart]) -> None:
    """Restore as a starting rank does."""
    codes = snapshot.shard_codes([part.shard for part in parts])
    for number, group in groupby(codes, key=itemgetter(0)):
        parts[number].restore(piece for _, piece in group)
    snapshot.dense()


class FarStore(MeteredStore):
    """Delay and slow each answer of a store, no matter how many are asked for at once."""

    def get_into(self, key: str, buffer: memoryview) -> int:
        """See ``ObjectStore``."""
        time.sleep(ANSWER_S + len(buffer) / CONNECTION_BYTES_PER_S)
        return super().get_into(key, buffer)


class BareRead:
    """boto3 alone: whole objects, as many at a time as a restore reads, looked at by nobody."""

    def __init__(self, service: Service, prefix: str, entries: Sequence[ObjectEntry]) -> None:
        self._at_once = gets_at_once(entries)
        self._client, self._bucket = service.client(self._at_once), service.bucket
        self._keys = [f"{prefix}/{entry.key}" for entry in entries]

    def run(self) -> None:
        """Read everything once."""
        with ThreadPoolExecutor(self._at_once) as pool:
            list(pool.map(self._read, self._keys))

    def _read(self, key: str) -> int:
        return len(self._client.get_object(Bucket=self._bucket, Key=key)["Body"].read())


def decode_rate(snapshot: Snapshot, parts: Sequence[ResidentPart]) -> float:
    """Bytes of objects that one core checks, decodes and puts into place in a second, from memory; the best of a few.

    They are those of the largest object.
    """
    entries = [entry for entry in snapshot.objects if isinstance(entry, ChunkEntry)]
    largest = max(entries, key=lambda entry: entry.bytes)
    body = bytearray(snapshot.store.get(largest.key))
    part = next(part for part in parts if part.table.name == largest.table)

    def decode() -> None:
        assert hashlib.sha256(body).hexdigest() == largest.sha256
        part.restore([chunk.decode_rows(body, largest.key)])

    return largest.bytes / min(timed(decode) for _ in range(5))


def timed(work: Any, *arguments: Any) -> float:
    """Seconds."""
    started = time.perf_counter()
    work(*arguments)
    return time.perf_counter() - started


def reset_peak() -> int:
    """Forget the most memory that this process ever had; returns what it has now."""
    Path("/proc/self/clear_refs").write_text("5")
    return memory("VmRSS")
