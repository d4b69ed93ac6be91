"""A small model whose state changes from step to step, cut up over any number of ranks; stores that die on purpose."""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import boto3
import numpy as np
import pytest
from numpy.typing import NDArray

from dlrm_api.checkpoint import Bits, PolicyName
from dlrm_api.errors import StoreUnavailableError
from dlrm_api.fields import S3Spec
from dlrm_api.names import ExitCode
from dlrm_api.tiers import RowDtype
from dlrm_checkpointer.codec.digest import shard_digest, state_digest, table_digest
from dlrm_checkpointer.codec.initializer import initial_rows
from dlrm_checkpointer.format.attempts import claim_attempt
from dlrm_checkpointer.handoff.cut import HandedOver
from dlrm_checkpointer.handoff.inbox import Inbox
from dlrm_checkpointer.handoff.writer import HandoffWriter
from dlrm_checkpointer.publish.publisher import Publisher, Terms
from dlrm_checkpointer.sidecar import Sidecar, SidecarTasks
from dlrm_checkpointer.status import Status
from dlrm_checkpointer.types import CutMeta, GoneRows, ShardId, ShardRows, SnapshotName, TableMeta
from dlrm_checkpointer.write.policy import ChainPolicy
from dlrm_checkpointer.write.retention import ORPHAN_S, RetentionPolicy
from dlrm_stores import ObjectStore, StoreOptions, open_store
from dlrm_stores.base import Body, ObjectInfo
from dlrm_stores.file import FileStore
from dlrm_testing.checkpointer.turns import Clock, InTurn


def table(
    name: str,
    rows: int,
    dim: int,
    *,
    blocks: int = 1,
    scale: float = 0.25,
    state: int = 1,
    dtype: RowDtype = "fp32",
    sizes: tuple[int, ...] = (),
) -> TableMeta:
    width = dim // blocks
    return TableMeta(
        name=name,
        rows=rows,
        dim=dim,
        seed=7,
        scale=float(np.float32(scale)),
        column_blocks=tuple((i * width, (i + 1) * width) for i in range(blocks)),
        state_columns=(state,) * blocks,
        dtype=dtype,
        row_values=("utility",) if sizes else (),
        sizes=sizes,
    )


def kept_as(meta: TableMeta, rows: NDArray[np.float32]) -> NDArray[np.float32]:
    """Rows as a trainer holds them: of fp16 tables the nearest fp16 values."""
    return rows.astype(np.float16).astype(np.float32) if meta.dtype == "fp16" else rows


TABLES = (
    table("users", 1_000, 8),
    table("items", 70_000, 16, blocks=2),
    table("one", 1, 4),
    table("zero", 50, 4, scale=0),
)
OTHER_TABLES = (
    table("adam", 90, 8, blocks=2, state=9),
    table("sgd", 80, 4, state=0),
    table("half", 120, 8, dtype="fp16"),
)
"""Tables with other row optimizers, and with fp16 rows."""


@dataclass
class Model:
    """Hold the logical state as a trainer of one rank would."""

    tables: tuple[TableMeta, ...] = TABLES
    rows: dict[str, NDArray[np.float32]] = field(default_factory=dict)
    state: dict[str, NDArray[np.float32]] = field(default_factory=dict)
    touched: dict[str, NDArray[np.bool_]] = field(default_factory=dict)
    """Rows ever updated."""
    touched_at: dict[str, NDArray[np.int64]] = field(default_factory=dict)
    """Step of each row's last update; 0: none."""
    dense: dict[str, NDArray[Any]] = field(default_factory=dict)
    step: int = 0
    data_index: str = ""

    def __post_init__(self) -> None:
        for each in self.tables:
            ids = np.arange(each.rows, dtype=np.int64)
            initial = initial_rows(each.seed, each.name, ids, range(each.dim), each.scale)
            self.rows[each.name] = kept_as(each, initial)
            self.state[each.name] = np.zeros((each.rows, each.state_width), np.float32)
            self.touched[each.name] = np.zeros(each.rows, bool)
            self.touched_at[each.name] = np.zeros(each.rows, np.int64)
        self.dense = {"top.0.weight": np.zeros((3, 5), np.float32), "opt.step": np.zeros((), np.int64)}

    def copy(self) -> Model:
        """Return a copy of the state."""
        return copy.deepcopy(self)

    def train(self, steps: int = 1) -> Model:
        for _ in range(steps):
            self.step += 1
            draw = np.random.default_rng(self.step)
            for each in self.tables:
                ids = np.unique(draw.integers(0, each.rows, max(1, each.rows // 20)))
                self.rows[each.name][ids] += draw.normal(0, 0.1, (len(ids), each.dim)).astype(np.float32)
                self.rows[each.name] = kept_as(each, self.rows[each.name])
                self.state[each.name][ids] += draw.random((len(ids), each.state_width), np.float32)
                if each.sizes:
                    self.resize(each, ids, draw.choice(each.row_sizes, len(ids)))
                self.touched[each.name][ids] = True
                self.touched_at[each.name][ids] = self.step
            self.dense["top.0.weight"] += draw.normal(0, 0.1, (3, 5)).astype(np.float32)
            self.dense["opt.step"] = np.asarray(self.step, np.int64)
        return self

    def resize(self, meta: TableMeta, row_ids: NDArray[np.int64], columns: NDArray[np.int64]) -> None:
        """Give rows that are updated in this step other numbers of columns."""
        rows = self.rows[meta.name]
        rows[row_ids] = np.where(np.arange(meta.dim) < columns[:, None], rows[row_ids], 0)
        self.state[meta.name].view(np.uint32)[row_ids, -1] = columns

    def meta(self, world_size: int, attempt: int = 1, parent: SnapshotName | None = None) -> CutMeta:
        return CutMeta(
            step=self.step,
            samples=self.step * 64,
            world_size=world_size,
            attempt=attempt,
            parent=parent,
            time=1_000.0 * self.step,
            reader={"next_batch": self.step, "fingerprint": {"files": [["a", 1]]}, "seed": 7}
            | ({"dataIndex": self.data_index} if self.data_index else {}),
            model={"tables": [each.to_json() for each in self.tables], "rowOptimizer": "rowwise-adagrad"},
            metrics={"ne": 0.9},
        )

    def shards(self, rank: int, world_size: int) -> list[ShardId]:
        """Rows of each table cut evenly; tables with two column blocks cut by columns too, on odd gangs' ranks."""
        found = []
        for each in self.tables:
            bounds = np.linspace(0, each.rows, world_size + 1).astype(int)
            columns = each.column_blocks if world_size % 2 == 0 else ((0, each.dim),)
            for start, end in columns:
                found.append(
                    ShardId(
                        table=each.name,
                        row_start=int(bounds[rank]),
                        row_end=int(bounds[rank + 1]),
                        column_start=start,
                        column_end=end,
                    )
                )
        return found

    def pieces(self, rank: int, world_size: int, parent: SnapshotName | None = None) -> Iterator[ShardRows]:
        """Rows that changed since the parent."""
        since = 0 if parent is None else parent.step
        metas = {each.name: each for each in self.tables}
        for shard in self.shards(rank, world_size):
            ids = (
                np.flatnonzero(self.touched_at[shard.table][shard.row_start : shard.row_end] > since) + shard.row_start
            )
            places = metas[shard.table].state_of(shard.column_start, shard.column_end)
            yield ShardRows(
                shard=shard,
                row_ids=ids.astype(np.int64),
                rows=self.rows[shard.table][ids, shard.column_start : shard.column_end],
                state=self.state[shard.table][ids, places.start : places.stop],
            )

    def gone(self, rank: int, world_size: int, parent: SnapshotName | None = None) -> Iterator[GoneRows]:
        """Yield keys that left tables of unique ids since the parent: there are no such tables."""
        return iter(())

    def digest(self) -> str:
        def read(name: str) -> Callable[[int, int], tuple[NDArray[np.float32], NDArray[np.float32]]]:
            return lambda start, end: (self.rows[name][start:end], self.state[name][start:end])

        tables = [
            (each.name, table_digest([shard_digest(each, each.whole(), read(each.name))])) for each in self.tables
        ]
        return state_digest(tables, self.dense)


@dataclass
class Pod:
    """Run the hand-off directory of a pod, its ranks' writers, and on request a sidecar in a thread."""

    folder: Path
    store: ObjectStore
    world_size: int = 1
    ranks: range = range(1)
    bits: Bits | Literal["auto"] = 32
    keep_last: int = 3
    keep_every_s: float | None = None
    orphan_s: float = ORPHAN_S
    policy: PolicyName = "full"
    max_chain: int = 24
    expected_restores: int = 3
    grace_s: float = 30.0
    """The first use of a kernel compiles it, which takes seconds."""
    budget_bytes: int | None = None
    target: ObjectStore | None = None
    """Store of deltas; None: nothing is published."""
    publish_bits: Literal[8, 16, 32] = 32
    publish_keep_last: int = 100
    trainers_restart: bool = False

    def __post_init__(self) -> None:
        self.open()
        self.status = Status()

    def open(self) -> None:
        """Start the ranks."""
        size, count = self.budget_bytes, len(self.ranks)
        self.writers = {rank: HandoffWriter(self.folder, rank, size, count) for rank in self.ranks}

    def cut(self, model: Model, attempt: int = 1, only: range | None = None) -> None:
        parent = self.writers[0].begin(attempt) if 0 in self.ranks else None
        for rank in only or self.ranks:
            self.cut_of(rank, model, attempt, parent=parent)

    def cut_of(
        self, rank: int, model: Model, attempt: int = 1, timeout_s: float = 20, parent: SnapshotName | None = None
    ) -> HandedOver:
        """One rank's part; where it is above the budget, a sidecar must run meanwhile."""
        dense = model.dense if rank == 0 else None
        meta, pieces = model.meta(self.world_size, attempt, parent), model.pieces(rank, self.world_size, parent)
        owned = model.shards(rank, self.world_size)
        gone = model.gone(rank, self.world_size, parent)
        return self.writers[rank].hand_over(meta, pieces, dense, owned=owned, timeout_s=timeout_s, gone=gone)

    def end(self, reason: str = "done", *, failed: bool = False) -> None:
        for writer in self.writers.values():
            writer.close(reason, failed=failed)

    def sidecar(self) -> tuple[Inbox, Sidecar]:
        inbox = Inbox(self.folder, self.ranks)
        chains = ChainPolicy(
            name=self.policy, base_every_s=None, max_chain=self.max_chain, max_restore_s=None, restore_bytes_per_s=1e8
        )
        duties = SidecarTasks(
            bits=self.bits,
            expected_restores=self.expected_restores,
            chains=chains,
            retention=RetentionPolicy(keep_last=self.keep_last, keep_every_s=self.keep_every_s, orphan_s=self.orphan_s),
            single_pod=len(self.ranks) == self.world_size,
            grace_s=self.grace_s,
            trainers_restart=self.trainers_restart,
        )
        return inbox, Sidecar(inbox, self.store, self.status, duties, self.publisher())

    def publisher(self) -> Publisher | None:
        if self.target is None:
            return None
        pod, pods = self.ranks.start // len(self.ranks), self.world_size // len(self.ranks)
        terms = Terms(bits=self.publish_bits, keep_last=self.publish_keep_last, pod=pod, pods=pods)
        self.running_publisher = Publisher(self.store, self.target, terms, self.status)
        return self.running_publisher

    def finish(self) -> ExitCode:
        """Run a sidecar over what is there, as if the trainers had just ended."""
        inbox, sidecar = self.sidecar()
        stop = threading.Event()
        stop.set()
        try:
            self.end()
            with pytest.MonkeyPatch.context() as patch:
                # Most commits wait for a second look.
                patch.setattr("dlrm_checkpointer.sidecar.POLL_INTERVAL_S", 0.002)
                return sidecar.run(stop)
        finally:
            inbox.close()
            if self.target:
                self.running_publisher.close()

    def commit(self, model: Model, attempt: int = 1) -> None:
        """One cut, committed by a sidecar that lives as long as that takes."""
        self.cut(model, attempt)
        code = self.finish()
        assert code == ExitCode.DONE, self.status.progress
        self.open()


class DyingStore:
    """Stop answering after some writes (puts and deletes), as a machine that goes down."""

    def __init__(self, store: ObjectStore, writes_left: int) -> None:
        self._store, self.writes_left = store, writes_left

    @property
    def uri(self) -> str:
        return self._store.uri

    def _write(self) -> None:
        self.writes_left -= 1
        self._alive()

    def _alive(self) -> None:
        if self.writes_left < 0:
            raise StoreUnavailableError("the store is gone")

    def get(self, key: str) -> bytes:
        self._alive()
        return self._store.get(key)

    def get_into(self, key: str, buffer: memoryview) -> int:
        self._alive()
        return self._store.get_into(key, buffer)

    def put(self, key: str, body: Body, sha256: str | None = None) -> None:
        self._write()
        self._store.put(key, body, sha256)

    def put_if_absent(self, key: str, body: Body) -> bool:
        self._write()
        return self._store.put_if_absent(key, body)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        self._alive()
        return self._store.list(prefix)

    def delete(self, key: str) -> None:
        self._write()
        self._store.delete(key)

    def delete_all(self, keys: Sequence[str]) -> None:
        for key in keys:
            self.delete(key)

    def size(self, key: str) -> int | None:
        self._alive()
        return self._store.size(key)

    def sweep_uploads(self, older_than_s: float) -> int:
        self._alive()
        return self._store.sweep_uploads(older_than_s)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Stands in for the time of all that waits; work that goes to threads elsewhere is done in turn."""
    clock = Clock()
    for module in ("sidecar", "handoff.cut", "handoff.writer", "format.attempts", "write.retention"):
        monkeypatch.setattr(f"dlrm_checkpointer.{module}.time", clock)
    monkeypatch.setattr("dlrm_stores.base.ThreadPoolExecutor", InTurn)
    return clock


@pytest.fixture
def new_model() -> type[Model]:
    return Model


@pytest.fixture
def small_tables() -> tuple[TableMeta, ...]:
    """Few rows, for tests that look at each of them in plain Python."""
    return (table("users", 300, 8), table("items", 100, 16, blocks=2), table("zero", 5, 4, scale=0), *OTHER_TABLES)


@pytest.fixture
def few_rows() -> tuple[TableMeta, ...]:
    """Fewer still, for tests that make hundreds of snapshots."""
    return (
        table("users", 60, 4),
        table("items", 30, 8, blocks=2, state=3),
        table("zero", 5, 4, scale=0, state=0),
        table("half", 20, 4, dtype="fp16"),
    )


@pytest.fixture
def all_tables() -> tuple[TableMeta, ...]:
    """Large tables and small ones, of every row optimizer and type."""
    return (*TABLES, *OTHER_TABLES)


@pytest.fixture
def new_pod() -> type[Pod]:
    return Pod


@pytest.fixture
def train_and_commit(tmp_path: Path, files: FileStore) -> Callable[[int], Model]:
    """Trains a model so many steps, each of which is committed: the first whole, then increments over each other."""

    def run(steps: int) -> Model:
        model, pod = Model(), Pod(tmp_path / "pod", files, policy="consecutive", keep_last=9)
        attempt = claim_attempt(files, None, "test")
        for _ in range(steps):
            pod.commit(model.train(), attempt)
        return model

    return run


@pytest.fixture
def dying() -> type[DyingStore]:
    return DyingStore


@pytest.fixture
def files(tmp_path: Path) -> FileStore:
    return FileStore(tmp_path / "store")


def s3_store(server: Any, folder: Path, bucket: str = "snapshots") -> ObjectStore:
    """Open a store on a fresh bucket of a real S3 server, with credentials as a mounted Secret has them."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "accessKeyId").write_text(server.access_key)
    (folder / "secretAccessKey").write_text(server.secret_key + "\n")
    client = boto3.client(
        "s3",
        endpoint_url=server.endpoint,
        region_name="us-east-1",
        aws_access_key_id=server.access_key,
        aws_secret_access_key=server.secret_key,
    )
    client.create_bucket(Bucket=bucket)
    return open_store(
        f"s3://{bucket}/jobs/a", StoreOptions(s3=S3Spec(endpoint=server.endpoint), credentials_dir=folder)
    )


STORES = [
    "file",
    pytest.param("versitygw", marks=pytest.mark.cluster),
    pytest.param("rclone_s3", marks=pytest.mark.cluster),
]


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    """Open every kind of store that the project knows, one after the other."""
    if request.param == "file":
        return open_store(f"file://{tmp_path}/a%20store")
    return s3_store(request.getfixturevalue(request.param), tmp_path / "credentials")


@dataclass
class ToDisk:
    """Record what reached the device, in order."""

    steps: list[tuple[str, Path]] = field(default_factory=list)
    """``synced`` files and folders, and names that files were ``renamed`` to."""

    def synced_before(self, name: Path) -> set[Path]:
        before = self.steps[: self.steps.index(("renamed", name))]
        return {path for what, path in before if what == "synced"}

    def synced_after(self, name: Path) -> set[Path]:
        after = self.steps[self.steps.index(("renamed", name)) :]
        return {path for what, path in after if what == "synced"}


@pytest.fixture
def to_disk(monkeypatch: pytest.MonkeyPatch) -> ToDisk:
    found, sync, replace = ToDisk(), os.fsync, Path.replace

    def remember_sync(descriptor: int) -> None:
        sync(descriptor)
        found.steps.append(("synced", Path(f"/proc/self/fd/{descriptor}").readlink()))

    def remember_name(path: Path, target: Path) -> Path:
        found.steps.append(("renamed", target))
        return replace(path, target)

    monkeypatch.setattr(os, "fsync", remember_sync)
    monkeypatch.setattr(Path, "replace", remember_name)
    return found
