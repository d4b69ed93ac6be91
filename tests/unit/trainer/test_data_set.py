"""Which files are a job's data set, and what is said of it."""

from __future__ import annotations

import os
import re
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake
from pyiceberg.catalog.sql import SqlCatalog

from dlrm_api.errors import BadDataError, InvalidSpecError, SnapshotError, TemporaryError
from dlrm_api.job import DLRMJobSpec, parse_job
from dlrm_api.progress import DataFiles
from dlrm_checkpointer import CutMeta, DataIndex
from dlrm_stores.data_files import DataFile
from dlrm_stores.file import FileStore
from dlrm_testing.trainer.gangs import run_ranks
from dlrm_trainer.checkpointing import data_set
from dlrm_trainer.checkpointing.data_set import TEXT, StoredData, describe, list_data_set, open_data_set, read_stored
from dlrm_trainer.data import criteo
from dlrm_trainer.data.index import Indexer
from dlrm_trainer.distributed.collectives import Collectives
from dlrm_trainer.metrics.progress import ProgressBoard

ALONE = Collectives(0, 1, lambda: "")


def write(path: Path, rows: int = 20, seed: int = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(seed)
    columns = {"label": random.integers(0, 2, rows).astype(np.int8), "C1": random.integers(0, 9, rows)}
    pq.write_table(pa.table(columns), path)
    return path


def spec_of(folder: Path, **data: Any) -> DLRMJobSpec:
    document = {
        "metadata": {"name": "demo"},
        "spec": {
            "model": {"tables": [{"name": "C1", "rows": 9, "dim": 4}], "interaction": "dcn"},
            "data": {
                "format": "parquet",
                "train": {"uris": [str(folder / "train")]},
                "globalBatchSize": 8,
                "virtualShards": 4,
            }
            | data,
            "checkpoint": {"uri": "file:///unused"},
        },
    }
    return parse_job(document).spec


class Opened:
    """The data set of one start, and what is noted of it."""

    def __init__(
        self, folder: Path, then: dict[str, Any] | None = None, versions: dict[str, int] | None = None, **data: Any
    ) -> None:
        self.store, self.board = FileStore(folder / "store"), ProgressBoard(1, 1)
        spec = spec_of(folder, **data)
        with ExitStack() as stack:
            stored = StoredData(store=self.store, fingerprint=then, where="file:///snapshot", versions=versions or {})
            found = open_data_set(stack, spec, list_data_set(spec), ALONE, self.board, lambda: stored, virtual_shards=4)
            self.names = [file.path.name for file in found.train.files]
            self.samples = found.train.num_samples
            self.now, self.index = describe(found.train), found.index
            meta = {"fingerprint": found.fingerprint}
        cut = CutMeta(step=1, samples=8, world_size=1, attempt=1, reader=meta)
        stored = read_stored(self.store, cut, "file:///snapshot")
        self.fingerprint, self.then, self.versions = found.fingerprint, dict(stored.fingerprint), dict(stored.versions)

    @property
    def notes(self) -> str:
        return "; ".join(self.board.now.notes)


def test_the_files_of_the_snapshot_remain_the_data_set_and_new_ones_are_named(tmp_path: Path) -> None:
    write(tmp_path / "train/day=2/p.parquet")
    first = Opened(tmp_path)
    write(tmp_path / "train/day=1/p.parquet", seed=1)
    (tmp_path / "train/day=3").mkdir()
    (tmp_path / "train/day=3/half.parquet").write_bytes(b"PAR1 not whole yet")

    again = Opened(tmp_path, first.then)

    assert (again.names, again.samples) == (["p.parquet"], 20)
    assert again.board.now.data_files == DataFiles(files=1, rows=20, reads=2)
    assert "2 new files since the snapshot are ignored" in again.notes
    assert "day=1/p.parquet" in again.notes


def test_new_files_are_refused_if_the_job_says_so(tmp_path: Path) -> None:
    write(tmp_path / "train/a.parquet")
    first = Opened(tmp_path)
    write(tmp_path / "train/b.parquet", seed=1)

    with pytest.raises(
        SnapshotError, match=r"new data files since the snapshot: .*b\.parquet; .*data\.newFiles: ignore"
    ):
        Opened(tmp_path, first.then, newFiles="refuse")


def test_a_touched_file_is_the_same_and_an_edited_one_is_not(tmp_path: Path) -> None:
    path = write(tmp_path / "train/a.parquet", rows=20_000)
    first = Opened(tmp_path)
    os.utime(path, ns=(1, 1))
    Opened(tmp_path, first.then)
    body = bytearray(path.read_bytes())
    body[100] ^= 1  # neither in the middle nor at the end, which samples cover
    path.write_bytes(bytes(body))

    with pytest.raises(
        SnapshotError, match=r"file:///snapshot: the data changed .*data\.files\[a\.parquet\]\.digest was"
    ):
        Opened(tmp_path, first.then)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that were read to index them."""
    names: list[str] = []
    real = Indexer.read

    def read(self: Indexer, file: DataFile, part: int, reads: str) -> DataIndex:
        names.append(file.path.name)
        return real(self, file, part, reads)

    monkeypatch.setattr(Indexer, "read", read)
    return names


def test_a_file_that_was_not_written_since_is_not_read_again(tmp_path: Path, reads: list[str]) -> None:
    for name in ("a", "b"):
        write(tmp_path / f"train/{name}.parquet")
    first = Opened(tmp_path)
    assert sorted(reads) == ["a.parquet", "b.parquet"]
    reads.clear()

    again = Opened(tmp_path, first.then)
    os.utime(tmp_path / "train/b.parquet", ns=(1, 1))
    touched = Opened(tmp_path, first.then)

    assert reads == ["b.parquet"]
    assert again.now == first.now
    assert [again.index, touched.index].count(first.index) == 1


def test_files_are_read_again_for_other_columns_and_after_the_index_was_damaged(
    tmp_path: Path, reads: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path / "train/a.parquet")
    first = Opened(tmp_path)
    [kept] = (tmp_path / "store/indexes").rglob("*.safetensors")
    kept.write_bytes(kept.read_bytes()[:-1] + b"x")
    reads.clear()

    assert Opened(tmp_path, first.then).now == first.now
    assert "index of data files is unusable" in caplog.text
    Opened(tmp_path, columns={"rename": {"C1": "label"}})

    assert reads == ["a.parquet"] * 2


def opened_shards(folder: Path, snapshot: int | None, planned: int, **data: Any) -> tuple[int, tuple[str, ...]]:
    """Open a data set with this number in the snapshot and in the plan; return the one in use, and notes."""
    spec, board = spec_of(folder, **data), ProgressBoard(1, 1)
    stored = StoredData(store=FileStore(folder / "store"), fingerprint=None, where="", virtual_shards=snapshot)
    with ExitStack() as stack:
        found = open_data_set(stack, spec, list_data_set(spec), ALONE, board, lambda: stored, virtual_shards=planned)
    used = found.fingerprint["order"]["virtualShards"]
    assert board.now.virtual_shards == used
    return used, board.now.notes


def test_the_snapshots_virtual_shards_go_before_the_plans_and_after_the_users(tmp_path: Path) -> None:
    write(tmp_path / "train/0.parquet")

    assert opened_shards(tmp_path, None, 2, virtualShards=None) == (2, ())
    assert opened_shards(tmp_path, 2, 2, virtualShards=None) == (2, ())
    used, notes = opened_shards(tmp_path, 8, 2, virtualShards=None)
    assert (used, len(notes)) == (8, 1)
    assert "data.virtualShards is 8, as in the snapshot" in notes[0]
    assert opened_shards(tmp_path, 8, 2, virtualShards=4) == (4, ())
    # The batch has changed, which the comparison of the data refuses.
    assert opened_shards(tmp_path, 3, 2, virtualShards=None) == (2, ())


def more_ranks_than_shards(collectives: Collectives, folder: Path) -> str:
    spec = spec_of(folder, virtualShards=None)
    listings = list_data_set(spec) if collectives.rank == 0 else None
    stored = StoredData(store=FileStore(folder / "store"), fingerprint=None, where="", virtual_shards=1)
    with ExitStack() as stack, pytest.raises(InvalidSpecError) as refused:
        open_data_set(stack, spec, listings, collectives, ProgressBoard(1, 2), lambda: stored, virtual_shards=4)
    return refused.value.path


@pytest.mark.slow
def test_more_ranks_than_the_snapshots_virtual_shards_are_refused_on_every_rank(tmp_path: Path) -> None:
    write(tmp_path / "train/0.parquet")

    assert run_ranks(2, more_ranks_than_shards, tmp_path) == ["spec.trainer.replicas"] * 2


def indexed(collectives: Collectives, folder: Path, edit: str, count: int) -> tuple[Any, ...]:
    """Open a data set, after rank 1 may have edited a file; return its files, what this rank read, and batches."""
    spec, names, real = spec_of(folder, globalBatchSize=16), list[str](), Indexer.read

    def read(self: Indexer, file: DataFile, part: int, reads: str) -> DataIndex:
        names.append(file.path.name)
        return real(self, file, part, reads)

    Indexer.read = read  # type: ignore[method-assign]
    stored = StoredData(store=FileStore(folder / "store"), fingerprint=None, where="file:///store")
    listings = list_data_set(spec) if collectives.rank == 0 else None
    collectives.gather("listed", TEXT)
    path = folder / "train/0.parquet"
    if collectives.rank == 1 and edit:
        if edit == "rewritten":
            path.write_bytes(path.read_bytes()[:-9] + bytes(9))
        os.utime(path, ns=(7, 7))
    collectives.gather("edited", TEXT)
    with ExitStack() as stack:
        try:
            found = open_data_set(
                stack, spec, listings, collectives, ProgressBoard(1, 2), lambda: stored, virtual_shards=4
            )
        except TemporaryError as error:
            return (str(error),)
        files = [(file.name, file.size, file.digest) for file in found.train.files]
        assert len(files) == count
        batches = [found.train.read(number).values.tolist() for number in range(found.train.batches_per_epoch)]
        return files, found.fingerprint, found.index, names, batches


def indexed_text(collectives: Collectives, folder: Path, part_bytes: int) -> tuple[Any, ...]:
    """Open a data set of one text file; return its index, labels, and the parts that this rank read."""
    criteo.PART_BYTES, parts, real = part_bytes, list[int](), Indexer.read

    def read(self: Indexer, file: DataFile, part: int, reads: str) -> DataIndex:
        parts.append(part)
        return real(self, file, part, reads)

    Indexer.read = read  # type: ignore[method-assign]
    spec = spec_of(folder, format="criteo-tsv", globalBatchSize=2_048)
    listings = list_data_set(spec) if collectives.rank == 0 else None
    with ExitStack() as stack:
        found = open_data_set(stack, spec, listings, collectives, ProgressBoard(1, 2), None, virtual_shards=4)
        return found.index, found.fingerprint, sorted(parts), found.train.num_samples


@pytest.mark.slow
def test_ranks_share_a_large_file_of_text_by_bytes(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    text = "".join("\t".join(["1", *["7"] * 13, *[f"{row:x}"] * 26]) + "\n" for row in range(30_000))
    (tmp_path / "train/day.tsv").write_text(text)

    [alone] = run_ranks(1, partial(indexed_text, folder=tmp_path, part_bytes=1 << 30))
    shared = run_ranks(2, partial(indexed_text, folder=tmp_path, part_bytes=1 << 20))

    assert [each[2] for each in shared] == [[0, 2, 4], [1, 3]]
    assert alone[2:] == ([0], 30_000)
    assert all(each[:2] == alone[:2] and each[3] == 30_000 for each in shared)


@pytest.mark.slow
def test_each_rank_reads_a_share_of_the_files_and_all_know_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_set, "ROUND_FILES", 4)
    for number in range(7):
        write(tmp_path / f"train/{number}.parquet", seed=number)

    first = run_ranks(2, partial(indexed, folder=tmp_path, edit="", count=7))
    again = run_ranks(2, partial(indexed, folder=tmp_path, edit="touched", count=7))
    [alone] = run_ranks(1, partial(indexed, folder=tmp_path, edit="", count=7))

    assert [len(each[3]) for each in first] == [4, 3]
    assert [each[3] for each in again] == [[], []]
    assert first[0][:3] == first[1][:3]
    assert [sorted(a + b) for a, b in zip(first[0][4], first[1][4], strict=True)] == [sorted(a) for a in alone[4]]
    assert [each[4] for each in again] == [each[4] for each in first]


@pytest.mark.slow
def test_a_copy_with_other_content_ends_all_ranks_and_names_the_rank(tmp_path: Path) -> None:
    for number in range(2):
        write(tmp_path / f"train/{number}.parquet", seed=number)
    run_ranks(2, partial(indexed, folder=tmp_path, edit="", count=2))

    found = run_ranks(2, partial(indexed, folder=tmp_path, edit="rewritten", count=2))

    [message] = set(found)
    assert re.match(r"rank \d found other data than rank 0: .*0\.parquet", message[0])


def test_what_grows_with_the_data_is_stored_once_and_not_in_the_snapshot(tmp_path: Path) -> None:
    for number in range(200):
        write(tmp_path / f"train/{number}.parquet", rows=1, seed=number)

    first, again = Opened(tmp_path), Opened(tmp_path)

    assert len(str(first.fingerprint)) < 1_000
    assert first.fingerprint == again.fingerprint
    assert len(first.then["files"]) == 200
    assert len(list((tmp_path / "store/documents").iterdir())) == 1


def test_a_file_list_that_was_lost_or_damaged_is_named(tmp_path: Path) -> None:
    write(tmp_path / "train/a.parquet")
    first = Opened(tmp_path)
    cut = CutMeta(step=1, samples=8, world_size=1, attempt=1, reader={"fingerprint": first.fingerprint})
    [kept] = (tmp_path / "store/documents").iterdir()
    kept.write_bytes(kept.read_bytes().replace(b"a.parquet", b"b.parquet"))

    with pytest.raises(SnapshotError, match=f"{kept.name}: corrupt"):
        read_stored(first.store, cut, "file:///snapshot")
    kept.unlink()
    with pytest.raises(SnapshotError, match=f"{kept.name}: not found"):
        read_stored(first.store, cut, "file:///snapshot")


def test_what_a_folder_leaves_out_is_noted_and_stored(tmp_path: Path) -> None:
    write(tmp_path / "train/a.parquet")
    (tmp_path / "train/README.md").touch()

    opened = Opened(tmp_path)

    assert "data.train: 1 files; left out: " in opened.notes
    assert "README.md (its name does not end in .parquet or .pq)" in opened.notes
    [kept] = (tmp_path / "store/documents").iterdir()
    assert b"README.md" in kept.read_bytes()


@pytest.mark.parametrize(
    ("rows", "note"),
    [
        (0, "data.eval: the evaluation files have no rows, so there is no evaluation"),
        (20, "data.eval: 1 of 1 evaluation files are training files too"),
    ],
)
def test_an_evaluation_that_says_little_is_noted(tmp_path: Path, rows: int, note: str) -> None:
    write(tmp_path / "train/a.parquet")
    write(tmp_path / "eval/copy.parquet", rows)

    assert note in Opened(tmp_path, eval={"uris": [str(tmp_path / "eval")]}).notes


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """A Delta table of two versions, both train and evaluation set."""
    for number in range(2):
        rows = pa.table({"label": [0, 1], "C1": [number, number]})
        write_deltalake(tmp_path / "table", rows, mode="append")
    return tmp_path / "table"


def of_table(folder: Path, **more: Any) -> dict[str, Any]:
    uris = {"uris": [str(folder)]}
    return {"format": "delta", "train": uris, "eval": uris} | more


def test_a_restart_keeps_the_version_of_a_table(tmp_path: Path, table: Path) -> None:
    first = Opened(tmp_path, **of_table(table))
    write_deltalake(table, pa.table({"label": [0], "C1": [7]}), mode="append")
    DeltaTable(table).delete("C1 = 0")

    again = Opened(tmp_path, first.then, first.versions, **of_table(table))

    assert first.versions == again.versions == {str(table): 1}
    assert (first.samples, again.samples) == (4, 4)
    assert f"{table} is read at version 1, its newest is 3" in again.notes
    assert Opened(tmp_path, **of_table(table)).versions == {str(table): 3}
    with pytest.raises(SnapshotError, match=r"read at version 1, its newest is 3; set data\.newFiles: ignore"):
        Opened(tmp_path, first.then, first.versions, **of_table(table, newFiles="refuse"))


def read_at_versions(folder: Path, table: Path, collectives: Collectives) -> tuple[dict[str, int], int]:
    """Open a table that gets another version after rank 0 listed it."""
    spec = spec_of(folder, **of_table(table))
    listings = list_data_set(spec) if collectives.rank == 0 else None
    if collectives.rank == 0:
        write_deltalake(table, pa.table({"label": [0], "C1": [7]}), mode="append")
    stored = StoredData(store=FileStore(folder / "store"), fingerprint=None, where="file:///store")
    with ExitStack() as stack:
        found = open_data_set(stack, spec, listings, collectives, ProgressBoard(1, 2), lambda: stored, virtual_shards=4)
        cut = CutMeta(step=1, samples=8, world_size=2, attempt=1, reader={"fingerprint": found.fingerprint})
        return dict(read_stored(stored.store, cut, "").versions), found.train.num_samples


@pytest.mark.slow
def test_all_ranks_read_the_version_that_rank_0_found(tmp_path: Path, table: Path) -> None:
    assert run_ranks(2, partial(read_at_versions, tmp_path, table)) == [({str(table): 1}, 4)] * 2


def test_columns_that_are_not_the_tables_are_refused(tmp_path: Path) -> None:
    (tmp_path / "warehouse").mkdir()
    catalog = SqlCatalog("test", uri=f"sqlite:///{tmp_path}/catalog.db", warehouse=f"file://{tmp_path}/warehouse")
    catalog.create_namespace("ads")
    rows = pa.table({"label": [0, 1], "C1": [1, 2], "C2": [3, 4]})
    table = catalog.create_table("ads.clicks", schema=rows.schema)
    table.append(rows)
    of_iceberg = of_table(Path(table.location().removeprefix("file://")), format="iceberg")
    assert Opened(tmp_path, **of_iceberg).samples == 2

    with table.update_schema() as change:
        change.delete_column("C1")
    with table.update_schema() as change:
        change.rename_column("C2", "C1")
    table.append(pa.table({"label": [0, 1], "C1": [5, 6]}))

    with pytest.raises(
        BadDataError, match=r"column C1 .* renamed, dropped or replaced \(field id 2, the table's is 3\)"
    ):
        Opened(tmp_path, **of_iceberg)


def test_a_partition_column_that_the_files_lack_is_named(tmp_path: Path) -> None:
    rows = pa.table({"label": [0, 1], "C1": [1, 2]})
    write_deltalake(tmp_path / "table", rows, partition_by=["C1"])

    with pytest.raises(BadDataError, match="C1 is a partition column"):
        Opened(tmp_path, **of_table(tmp_path / "table"))


def test_a_table_format_whose_package_is_absent_names_the_extra(
    tmp_path: Path, table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "dlrm_stores.delta", raising=False)
    monkeypatch.setitem(sys.modules, "deltalake", None)

    with pytest.raises(InvalidSpecError, match=r"needs the package deltalake.*\[delta\]"):
        Opened(tmp_path, **of_table(table))
