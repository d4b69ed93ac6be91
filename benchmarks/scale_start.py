"""How many requests a start and a commit make of the stores: real code, counted, for many ranks and files."""

from __future__ import annotations

import hashlib
import io
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.measure import Result, tell
from benchmarks.scratch import SHARED_MEMORY
from dlrm_api.checkpoint import CheckpointSpec
from dlrm_api.job import DLRMJobSpec, parse_job
from dlrm_checkpointer import CutMeta, HandoffWriter, RetentionPolicy, ShardId, ShardRows, TableMeta, claim_attempt
from dlrm_checkpointer.format.chunk import encode_dense
from dlrm_checkpointer.format.manifest import (
    CHUNKS,
    ChainLink,
    ChainSummary,
    ChunkEntry,
    Manifest,
    ObjectEntry,
    manifest_key,
)
from dlrm_checkpointer.handoff.inbox import Inbox
from dlrm_checkpointer.sidecar import Sidecar, SidecarTasks
from dlrm_checkpointer.status import Status
from dlrm_checkpointer.write.policy import ChainPolicy
from dlrm_stores.base import Body, ObjectInfo
from dlrm_stores.file import FileStore
from dlrm_stores.locations import Places
from dlrm_trainer.checkpointing import data_set
from dlrm_trainer.checkpointing.data_set import StoredData, list_data_set, open_data_set, read_stored
from dlrm_trainer.checkpointing.restore import choose_start, open_together
from dlrm_trainer.data.index import ListedFiles, index_files
from dlrm_trainer.data.reader import READERS
from dlrm_trainer.distributed.collectives import Collectives, decode_value, encode_value
from dlrm_trainer.metrics.progress import ProgressBoard

FILES, RANKS, SAMPLED = 10_000, 1_024, (1, 511, 1_023)
"""Simulated ranks that open their data whole; all others would make as many requests."""
SMALL_FILES = 20_000
PAGE_KEYS, LISTED_BYTES = 1_000, 400
"""Of a page of a listing, and of a key in it (estimated)."""
MAX_RESTART_BYTES = 64e6
BASE_OBJECTS, INCREMENTS, INCREMENT_OBJECTS = 100_000, 7, 10_000
"""Of the chain that is restored: objects of 32 MiB at most, so rows of terabytes."""
COMMIT_RANKS, COMMIT_PODS = 256, 32
POLL_S, SEARCH_S = 2.0, 5.0


class Bucket:
    """Hold equal objects in memory, and count the requests and bytes that real code asks for."""

    bucket = "data"

    def __init__(self, count: int, body: bytes) -> None:
        self._count, self._body = count, body
        self._lock = threading.Lock()
        self.requests: Counter[str] = Counter()
        self.bytes = 0

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """List the objects; a request for each page."""
        names = (f"days/part-{number:06}.parquet" for number in range(self._count))
        found = [name for name in names if name.startswith(prefix)]
        with self._lock:
            self.requests["list"] += max(1, -(-len(found) // PAGE_KEYS))
            self.bytes += LISTED_BYTES * len(found)
        for name in found:
            yield ObjectInfo(key=name, size=len(self._body), modified=0.0, etag=f'"{name[-40:]:0>32}"')

    def get_range_of(self, _key: str, _etag: str, start: int, length: int) -> bytes:
        """Return a range of one."""
        with self._lock:
            self.requests["get"] += 1
            self.bytes += length
        return self._body[start : start + length]


class CountingStore(FileStore):
    """Count the requests of a store of snapshots, and the bytes that are read."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self._lock = threading.Lock()
        self.reset()

    def reset(self) -> None:
        """Begin to count."""
        self.requests: Counter[str] = Counter()
        self.bytes = 0

    def _count(self, what: str, size: int = 0) -> None:
        with self._lock:
            self.requests[what] += 1
            self.bytes += size

    def get(self, key: str) -> bytes:
        """Read and count."""
        self._count(f"get {key.partition('/')[0]}")
        body = super().get(key)
        self.bytes += len(body)
        return body

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """List and count."""
        self._count("list")
        return super().list(prefix)

    def put(self, key: str, body: Body, sha256: str | None = None) -> None:
        """Write and count."""
        self._count("put")
        super().put(key, body, sha256)

    def put_if_absent(self, key: str, body: Body) -> bool:
        """Write and count."""
        self._count("put")
        return super().put_if_absent(key, body)

    def size(self, key: str) -> int | None:
        """Look and count."""
        self._count("head")
        return super().size(key)


class ChainStore(CountingStore):
    """Have objects of rows of one byte, without files for them."""

    def __init__(self, root: Path, objects: Mapping[str, bytes]) -> None:
        self._objects = objects
        super().__init__(root)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """List and count."""
        if not prefix.startswith(CHUNKS):
            yield from super().list(prefix)
            return
        found = [key for key in self._objects if key.startswith(prefix)]
        self.requests["list"] += max(1, -(-len(found) // PAGE_KEYS))
        for key in found:
            yield ObjectInfo(key=key, size=len(self._objects[key]), modified=0.0, etag="")

    def get_into(self, key: str, buffer: memoryview) -> int:
        """Read and count."""
        self._count("get dense" if "/dense" in key else "get rows")
        buffer[:] = self._objects[key]
        return len(self._objects[key])


class FirstOfMany(Collectives):
    """Be rank 0 of many: the others read their shares when theirs are gathered."""

    def __init__(self, spec: DLRMJobSpec, ranks: int, bucket: Bucket) -> None:
        super().__init__(0, ranks, lambda: "")
        self._spec, self._bucket = spec, bucket
        self.of_sampled = 0
        """Requests of the sampled ranks for their shares, which they make once more on their own."""
        self.sent: list[bytes] = []
        self.scattered: list[list[bytes]] = []
        """By call and rank."""
        self.came: list[list[Any]] = []
        self._rounds = 0

    def all_reduce(self, tensor: Any) -> None:
        """Do nothing: no other rank works when rank 0 waits."""

    def broadcast(self, value: Any, kind: Any) -> Any:
        """Note the value for the others."""
        self.sent.append(encode_value(value, kind))
        return value

    def scatter(self, values: Any, kind: Any) -> Any:
        """Note the values for the others."""
        self.scattered.append([encode_value(value, kind) for value in values])
        return values[0]

    def gather(self, value: Any, kind: Any) -> list[Any]:
        """Return what all ranks send."""
        if kind is not data_set.BODY:
            self.came.append([value] * self.world_size)
            return self.came[-1]
        plan = decode_value(self.sent[0], data_set.PLAN, 0)
        some = plan.missing[self._rounds * data_set.ROUND_FILES :][: data_set.ROUND_FILES]
        self._rounds += 1
        make = READERS[self._spec.data.format].indexer
        assert make is not None
        files = ListedFiles.of(plan.listing, Places(self._spec.data.s3, None))
        shares = [value]
        for rank in range(1, self.world_size):
            before = self._bucket.requests.total()
            mine = [files[place] for place in some[rank :: self.world_size]]
            shares.append(bytes(index_files(make(self._spec), mine, plan.reads).encode()))
            self.of_sampled += self._bucket.requests.total() - before if rank in SAMPLED else 0
        self.came.append(shares)
        return self.came[-1]


class OneOfMany(Collectives):
    """Be another rank: receive what rank 0 sent and all ranks gathered."""

    def __init__(self, rank: int, first: FirstOfMany) -> None:
        super().__init__(rank, first.world_size, lambda: "")
        self._sent, self._scattered, self._came = iter(first.sent), iter(first.scattered), iter(first.came)

    def all_reduce(self, tensor: Any) -> None:
        """Do nothing."""

    def broadcast(self, value: Any, kind: Any) -> Any:
        """Return what rank 0 sent."""
        assert value is None
        return decode_value(next(self._sent), kind, 0)

    def scatter(self, values: Any, kind: Any) -> Any:
        """Return what rank 0 sent to this one."""
        assert values is None
        return decode_value(next(self._scattered)[self.rank], kind, 0)

    def gather(self, value: Any, kind: Any) -> list[Any]:
        """Return what was gathered."""
        del value, kind
        return next(self._came)


def _spec() -> DLRMJobSpec:
    model = {"tables": [{"name": "C1", "rows": 1_000, "dim": 4}], "interaction": "dcn"}
    data = {"format": "parquet", "train": {"uris": ["s3://data/days"]}, "globalBatchSize": 4096, "virtualShards": 2048}
    spec = {"model": model, "data": data, "checkpoint": {"uri": "file:///unused"}}
    return parse_job({"metadata": {"name": "scale"}, "spec": spec}).spec


def _parquet(rows: int) -> bytes:
    random, body = np.random.default_rng(0), io.BytesIO()
    columns = {"label": random.integers(0, 2, rows), "C1": random.integers(0, 1_000, rows), "x": random.random(rows)}
    pq.write_table(pa.table(columns), body, row_group_size=max(1, rows // 4))
    return body.getvalue()


def _open(
    spec: DLRMJobSpec, bucket: Bucket, store: CountingStore, ranks: int, then: Mapping[str, Any] | None
) -> tuple[dict[str, Any], int, dict[str, Any]]:
    """Start all ranks; return the fingerprint, the requests of all, and what else was seen."""
    first, board, shards = FirstOfMany(spec, ranks, bucket), ProgressBoard(1, ranks), spec.virtual_shards
    began = time.monotonic()
    with ExitStack() as stack:
        stored = StoredData(store=store, fingerprint=then, where="file:///snapshot")
        found = open_data_set(stack, spec, list_data_set(spec), first, board, lambda: stored, virtual_shards=shards)
    seconds = time.monotonic() - began
    alone = bucket.requests.total() + store.requests.total()
    measured: dict[str, Any] = {"of_data": dict(bucket.requests), "of_snapshots": dict(store.requests)}
    measured |= {"seconds": seconds, "broadcast_bytes": sum(map(len, first.sent))}
    sampled = [each for each in SAMPLED if each < ranks]
    for rank in sampled:
        with ExitStack() as stack:
            other = OneOfMany(rank, first)
            open_data_set(stack, spec, None, other, board, lambda: stored, virtual_shards=shards)
    by_sampled = bucket.requests.total() + store.requests.total() - alone - first.of_sampled
    return found.fingerprint, alone + by_sampled * (ranks - 1) // len(sampled), measured


def start(is_quick: bool) -> Iterator[Result]:
    """Count requests of a first start and of a restart."""
    cases = [(200, 16, 2_000)] if is_quick else [(FILES, RANKS, 20_000), (SMALL_FILES, RANKS, 100)]
    for files, ranks, rows in cases:
        tell(f"start: {files} files of {rows} rows, {ranks} ranks")
        spec, bucket = _spec(), Bucket(files, _parquet(rows))
        setting = {"files": files, "file_bytes": len(bucket.get_range_of("", "", 0, 1 << 30)), "ranks": ranks}
        with tempfile.TemporaryDirectory() as folder, mock.patch.object(Places, "bucket", return_value=bucket):
            store, fingerprint = CountingStore(Path(folder)), dict[str, Any]()
            for name in ("first_start", "restart"):
                bucket.requests.clear()
                bucket.bytes = 0
                store.reset()
                then = None
                if name == "restart":
                    meta = {"fingerprint": fingerprint}
                    cut = CutMeta(step=1, samples=1, world_size=ranks, attempt=1, reader=meta)
                    then = read_stored(store, cut, "file:///snapshot").fingerprint
                fingerprint, requests, measured = _open(spec, bucket, store, ranks, then)
                pages = -(-files // PAGE_KEYS)
                limit = 3 * files + 3 * ranks if name == "first_start" else pages + 3 * ranks
                yield Result(
                    metric=f"requests_at_{name}", value=requests, limit=limit, setting=setting, measured=measured
                )
            # The last counts are those of the restart.
            read = bucket.bytes + store.bytes
            yield Result(metric="bytes_read_at_restart", value=read, limit=MAX_RESTART_BYTES, setting=setting)


def _chain(base: int, increments: int, objects: int, ranks: int) -> tuple[dict[str, bytes], list[Manifest]]:
    """Return the objects, and the manifests, of a full snapshot and increments of a table that ranks share by rows."""
    table = TableMeta(
        name="C1", rows=base, dim=4, seed=0, scale=0.0, column_blocks=((0, 4),), state_columns=(1,), dtype="fp32"
    )
    bodies, manifests, links = dict[str, bytes](), list[Manifest](), list[ChainLink]()
    dense, growth = bytes(encode_dense({"w": np.zeros(1, np.float32)})), ChainSummary(base_bytes=base, base_time=0.0)
    for step in range(1, increments + 2):
        mine = np.arange(base) if step == 1 else np.random.default_rng(step).choice(base, objects, replace=False)
        chunks, cut = list[ChunkEntry](), f"{CHUNKS}{step:016}/00000001"
        for row in np.sort(mine).tolist():
            body = row.to_bytes(4)
            sha256, shard = hashlib.sha256(body).hexdigest(), ShardId("C1", row, row + 1, 0, 4)
            key = f"{cut}/{row * ranks // base:06}/C1-{sha256[:16]}.safetensors"
            bodies[key] = body
            put = ObjectEntry(key=key, bytes=len(body), sha256=sha256)
            chunks.append(ChunkEntry.of(put, shard, np.array([row])))
        key, sha256 = f"{cut}/000000/dense.safetensors", hashlib.sha256(dense).hexdigest()
        bodies[key] = dense
        meta = CutMeta(step=step, samples=step, world_size=ranks, attempt=1, model={"tables": [table.to_json()]})
        manifest = Manifest(
            kind="increment" if links else "full",
            bits=32,
            chain=tuple(links),
            growth=growth,
            meta=meta.to_json(),
            chunks=tuple(chunks),
            dense=ObjectEntry(key=key, bytes=len(dense), sha256=sha256),
        )
        manifests.append(manifest)
        links.append(ChainLink(step=step, attempt=1, sha256=hashlib.sha256(manifest.encode()).hexdigest()))
    return bodies, manifests


def restore(is_quick: bool) -> Iterator[Result]:
    """Count requests for all but rows when many ranks choose and open a snapshot with a chain."""
    base, increments, objects, ranks = (2_000, 2, 200, 16) if is_quick else (
        BASE_OBJECTS, INCREMENTS, INCREMENT_OBJECTS, RANKS
    )  # fmt: skip
    bodies, manifests = _chain(base, increments, objects, ranks)

    def opened(collectives: Collectives) -> tuple[int, float]:
        rank, began = collectives.rank, time.monotonic()
        shard = ShardId("C1", rank * base // ranks, (rank + 1) * base // ranks, 0, 4)
        start = choose_start(store, collectives, "scale", committed="")
        assert start.snapshot is not None
        snapshot = open_together(store, collectives, start.snapshot, [shard])
        snapshot.dense()
        return sum(len(manifest.chunks) for manifest in snapshot.chain.manifests), time.monotonic() - began

    with tempfile.TemporaryDirectory() as folder:
        store = ChainStore(Path(folder), bodies)
        claim_attempt(store, None, "scale")
        for manifest in manifests:
            store.put(manifest_key(manifest.name.step, 1), manifest.encode())
        store.reset()
        first = FirstOfMany(_spec(), ranks, Bucket(0, b""))
        _, seconds = opened(first)
        of_first = Counter(store.requests)
        store.reset()
        sampled = [each for each in SAMPLED if each < ranks]
        held, rank_seconds = zip(*(opened(OneOfMany(rank, first)) for rank in sampled), strict=True)
        of_sampled = Counter(store.requests)
    for each in (of_first, of_sampled):
        del each["get rows"]
    requests = of_first.total() + of_sampled.total() * (ranks - 1) // len(sampled)
    pages = sum(-(-(len(manifest.chunks) + 1) // PAGE_KEYS) for manifest in manifests)
    yield Result(
        metric="requests_at_restore",
        value=requests,
        limit=pages + 3 * ranks,
        setting={"objects": base + increments * objects, "manifests": len(manifests), "ranks": ranks},
        measured={
            "of_rank_0": dict(of_first),
            "of_another_rank": {what: count / len(sampled) for what, count in of_sampled.items()},
            "seconds": seconds,
            "seconds_of_another_rank": max(rank_seconds),
            "broadcast_bytes": sum(map(len, first.sent)),
            "scattered_bytes": sum(len(body) for bodies in first.scattered for body in bodies),
            "bytes_of_manifests": sum(len(manifest.encode()) for manifest in manifests),
            "objects_held_by_a_rank": max(held),
        },
    )


class _Pod:
    """Be some ranks that cut one row each, and their sidecar in a thread."""

    def __init__(self, folder: Path, store: CountingStore, ranks: range, world_size: int) -> None:
        self._ranks, self._world_size, self.status = ranks, world_size, Status()
        self._writers = [HandoffWriter(folder, rank, None, len(ranks)) for rank in ranks]
        self._inbox, self._stop = Inbox(folder, ranks), threading.Event()
        spec = CheckpointSpec(uri="file:///unused")
        chains = ChainPolicy(
            name="full",
            base_every_s=None,
            max_chain=spec.max_chain,
            max_restore_s=None,
            restore_bytes_per_s=float(spec.restore_bandwidth),
        )
        tasks = SidecarTasks(
            bits=32,
            expected_restores=0,
            chains=chains,
            retention=RetentionPolicy(keep_last=1),
            single_pod=False,
            grace_s=60.0,
        )
        self._thread = threading.Thread(target=Sidecar(self._inbox, store, self.status, tasks).run, args=(self._stop,))
        self._thread.start()

    def cut(self, attempt: int) -> None:
        """Hand over a cut of each rank."""
        ranks, dim = self._world_size, 4
        table = TableMeta(
            name="C1",
            rows=ranks,
            dim=dim,
            seed=0,
            scale=0.0,
            column_blocks=((0, dim),),
            state_columns=(1,),
            dtype="fp32",
        )
        meta = CutMeta(step=1, samples=1, world_size=ranks, attempt=attempt, model={"tables": [table.to_json()]})
        for rank, writer in zip(self._ranks, self._writers, strict=True):
            shard = ShardId("C1", rank, rank + 1, 0, dim)
            rows, state = np.ones((1, dim), np.float32), np.ones((1, 1), np.float32)
            row = ShardRows(shard=shard, row_ids=np.array([rank]), rows=rows, state=state)
            dense = {"w": np.zeros(1, np.float32)} if rank == 0 else None
            writer.hand_over(meta, [row], dense, owned=[shard], timeout_s=60.0)

    def close(self) -> None:
        """End the ranks and the sidecar."""
        for writer in self._writers:
            writer.close("done")
        self._stop.set()
        self._thread.join()
        self._inbox.close()


def commit(is_quick: bool) -> Iterator[Result]:
    """Count the reads of a store when the pods of many ranks commit one cut."""
    ranks, pods = (16, 4) if is_quick else (COMMIT_RANKS, COMMIT_PODS)
    each = ranks // pods
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as folder:
        store = CountingStore(Path(folder, "store"))
        attempt = claim_attempt(store, None, "scale")
        gang = [_Pod(Path(folder, str(pod)), store, range(pod * each, (pod + 1) * each), ranks) for pod in range(pods)]
        # Each looks for snapshots of earlier sidecars first.
        time.sleep(SEARCH_S)
        store.reset()
        began = time.monotonic()
        for pod in gang:
            pod.cut(attempt)
        while any(pod.status.progress.last_snapshot is None for pod in gang):
            time.sleep(0.01)
        seconds, requests = time.monotonic() - began, dict(store.requests)
        for pod in gang:
            pod.close()
    limit = ranks + 2 * pods + pods * int(seconds / POLL_S)
    setting, measured = {"ranks": ranks, "pods": pods}, {"requests": requests, "seconds": seconds}
    reads = sum(count for what, count in requests.items() if what.startswith("get "))
    yield Result(metric="reads_at_a_commit", value=reads, limit=limit, setting=setting, measured=measured)
