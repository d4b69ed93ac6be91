"""``dlrmctl snapshots convert``: tables of row numbers become tables of unique ids, and back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dlrm_api.errors import DLRMError, SnapshotError, UsageError
from dlrm_api.names import ExitCode
from dlrm_checkpointer import Conversion, convert_snapshot
from dlrm_checkpointer.codec.initializer import id_seed
from dlrm_checkpointer.codec.rows import Bits, decode_rows
from dlrm_checkpointer.read.catalog import find_snapshot, verify_snapshot
from dlrm_checkpointer.read.restore import Snapshot
from dlrm_checkpointer.types import CutMeta, SnapshotName
from dlrm_cli import app
from dlrm_kernels.eviction import rows_that_fit
from dlrm_kernels.hashing import keys_of_ids
from dlrm_stores import ObjectStore
from dlrm_stores.file import FileStore
from dlrm_testing.checkpointer.fixtures import table
from dlrm_testing.checkpointer.turns import Clock, MemoryStore
from dlrm_testing.checkpointer.unique import UniqueModel, commit, unique_table
from dlrm_testing.digests import snapshot_digest

TABLES = (table("users", 300, 8), table("items", 90, 8, blocks=2), table("half", 120, 4, dtype="fp16"), unique_table())
POLICIES = ["full", "one-shot", "consecutive", "intermittent"]


class HashedModel(UniqueModel):
    """A model whose snapshots say how ids become rows, as a trainer's do."""

    hashed = "none"

    def meta(self, world_size: int, attempt: int = 1, parent: SnapshotName | None = None) -> CutMeta:
        meta = super().meta(world_size, attempt, parent)
        tables = [each | {"hash": each.get("ids", self.hashed)} for each in meta.model["tables"]]
        return replace(meta, model=meta.model | {"tables": tables})


class OtherStore(MemoryStore):
    uri = "memory:other"


class ThirdStore(MemoryStore):
    uri = "memory:third"


def convert(snapshot: Snapshot, store: ObjectStore, *wanted: Conversion, drop: bool = False) -> Snapshot:
    convert_snapshot(snapshot, store, wanted, drop=drop, on_read=lambda _: None)
    return find_snapshot(store)


def to(ids: Any, *names: str, **sizes: Any) -> list[Conversion]:
    return [Conversion(table=name, ids=ids, **sizes) for name in names]


def rows_of(snapshot: Snapshot, name: str) -> dict[int, bytes]:
    """Weights and optimizer state, without ``touched``, of the rows that were ever updated."""
    meta, found = snapshot.table(name), {}
    for _, coded in snapshot.shard_codes([meta.whole()]):
        piece = decode_rows(coded)
        for place, row in enumerate(piece.row_ids.tolist()):
            state = piece.state[place, : sum(meta.state_columns)]
            found[row] = piece.rows[place].tobytes() + state.tobytes()
    return found


def decoded(snapshot: Snapshot, name: str) -> tuple[dict[int, np.ndarray], dict[int, list[float]]]:
    pieces = [decode_rows(coded) for _, coded in snapshot.shard_codes([snapshot.table(name).whole()])]
    rows = {row: piece.rows[place] for piece in pieces for place, row in enumerate(piece.row_ids.tolist())}
    states = {row: piece.state[place].tolist() for piece in pieces for place, row in enumerate(piece.row_ids.tolist())}
    return rows, states


def keyed(rows: dict[int, Any], name: str) -> dict[int, Any]:
    keys = keys_of_ids(np.array(list(rows), np.uint64), np.uint64(id_seed(7, name))).tolist()
    return dict(zip(keys, rows.values(), strict=True))


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_rows_keep_their_bits_there_and_back(data: st.DataObject, clock: Clock, monkeypatch: pytest.MonkeyPatch):
    """Of any chain, at any bits and sharding, with rows in any number of runs and chunks."""
    monkeypatch.setattr("dlrm_checkpointer.write.convert.RUN_BYTES", data.draw(st.sampled_from([1, 3_000, 1 << 28])))
    monkeypatch.setattr("dlrm_checkpointer.write.convert.BLOCK_BYTES", data.draw(st.sampled_from([5, 1 << 17])))
    monkeypatch.setattr("dlrm_checkpointer.write.merge.INCREMENT_CHUNK_BYTES", data.draw(st.sampled_from([1, 900])))
    store, model, name = MemoryStore(clock), HashedModel(TABLES), None
    bits = data.draw(st.sampled_from([32, 8, 3]))
    for _ in range(data.draw(st.integers(1, 4))):
        options = {"world_size": data.draw(st.integers(1, 3)), "policy": data.draw(st.sampled_from(POLICIES))}
        name = commit(store, model.train(), name, bits=bits, **options)
    source = find_snapshot(store)

    there = convert(source, OtherStore(clock), *to("unique", "users", "half"))
    back = convert(there, ThirdStore(clock), *to("rows", "users", "half"))

    assert (there.name, there.manifest.kind, there.manifest.version) == (source.name, "full", 3)
    for each in ("users", "half"):
        assert rows_of(there, each) == keyed(rows_of(source, each), each)
        assert there.table(each).is_unique
    assert rows_of(there, "ids") == rows_of(source, "ids")
    assert verify_snapshot(there).rows == verify_snapshot(source).rows
    assert snapshot_digest(back) == snapshot_digest(source)
    assert back.meta.model == source.meta.model


def test_rows_keep_their_sizes_and_pruned_ones_are_gone(clock: Clock):
    """Of the weights, state and utility of rows, those of pruned ones are lost: an id without a row reads the same."""
    meta = table("pruned", 60, 12, sizes=(3, 6, 12))
    store, model, name = MemoryStore(clock), HashedModel((meta,)), None
    for _ in range(30):
        name = commit(store, model.train(), name, bits=8)
    source = find_snapshot(store)
    rows = {row: each for row, each in sized(source).items() if each[0]}

    [made] = convert_snapshot(source, OtherStore(clock), to("unique", "pruned"), on_read=lambda _: None)
    there = convert(source, ThirdStore(clock), *to("unique", "pruned"))
    back = convert(there, MemoryStore(Clock()), *to("rows", "pruned"))

    assert made.rows == len(rows) < len(sized(source))
    assert sized(there) == keyed(rows, "pruned")
    assert sized(back) == rows
    assert back.table("pruned") == meta


def sized(snapshot: Snapshot) -> dict[int, Any]:
    """Sizes, weights, optimizer state and utility of rows."""
    meta, found = snapshot.table("pruned"), {}
    for _, coded in snapshot.shard_codes([meta.whole()]):
        piece = decode_rows(coded)
        for place, row in enumerate(piece.row_ids.tolist()):
            found[row] = coded.columns, piece.rows[place].tobytes(), piece.state[place, [0, -1]].tobytes()
    return found


def test_counters_and_shared_rows_of_a_converted_table_are_left_out(clock: Clock):
    others = [replace(table(f"{name}.shared", 16, 8), shared_of=name) for name in ("ids", "more")]
    others += [replace(table(f"{name}.counts", 16, 4, state=16), counts_of=name) for name in ("ids", "more")]
    store, model = MemoryStore(clock), HashedModel((unique_table(rows=9), unique_table("more"), *others))
    model.step = 1
    model.update("ids", keys_of_ids(np.arange(9, dtype=np.uint64), np.uint64(id_seed(7, "ids"))).tolist())
    commit(store, model, None)

    there = convert(find_snapshot(store), OtherStore(clock), *to("rows", "ids"))

    assert verify_snapshot(there).rows == {"ids": 9, "more": 0, "more.shared": 0}
    assert [each.name for each in there.meta.tables] == ["ids", "more", "more.shared", "more.counts"]


@pytest.mark.parametrize("hashed", ["modulo", "mix"])
@pytest.mark.parametrize("bits", [32, 16, 4])
def test_rows_of_hashed_ids_become_shared_ones_halved(clock: Clock, hashed: str, bits: Bits):
    source = trained(clock, hashed, bits)

    there = convert(source, OtherStore(clock), *to("unique", "users", "half", buckets=8))

    assert [each.name for each in there.meta.tables][len(TABLES) :] == ["users:shared", "half:shared"]
    for name in ("users", "half"):
        old, new = source.table(name), there.table(f"{name}:shared")
        assert (new.rows, new.shared_of, new.scale) == (-(-old.rows // 8) * 8, name, old.scale)
        assert there.table(name).is_unique
        assert not rows_of(there, name)
        (was, state), (is_now, state_now) = decoded(source, name), decoded(there, new.name)
        assert was.keys() == is_now.keys()
        assert state == state_now
        assert all(np.allclose(was[row] / 2, is_now[row], rtol=1e-3, atol=1e-7) for row in was)
        assert bits != 32 or name != "users" or all((was[row] / 2 == is_now[row]).all() for row in was)


def test_converted_rows_were_touched_in_the_snapshots_step(clock: Clock):
    store = MemoryStore(clock)
    model = HashedModel(TABLES).train(70)
    commit(store, model, None)

    there = convert(find_snapshot(store), OtherStore(clock), *to("unique", "users"))

    pieces = (decode_rows(coded) for _, coded in there.shard_codes([there.table("users").whole()]))
    assert {int(step) for piece in pieces for step in piece.state.view(np.uint32)[:, -1]} == {70}


def trained(clock: Clock, hashed: str = "none", bits: Bits = 32) -> Snapshot:
    """Nearly all 300 rows of ``users`` were updated."""
    store, model = MemoryStore(clock), HashedModel(TABLES)
    model.hashed = hashed
    commit(store, model.train(60), None, bits=bits)
    return find_snapshot(store)


def test_rows_beyond_a_buckets_quota_are_dropped_as_by_an_eviction(clock: Clock, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("dlrm_checkpointer.write.convert.GROUP_ROWS", 100)
    source = trained(clock)
    sizes = {"rows": 260, "buckets": 4}
    every = keyed(rows_of(source, "users"), "users")
    keys = np.array(sorted(every))
    kept = keys[rows_that_fit(keys, np.zeros(len(keys)), 4, 65)].tolist()

    with pytest.raises(
        UsageError, match=r"table users: .* of 4 buckets .* set at least (\d+) rows, or --drop"
    ) as refused:
        convert(source, OtherStore(clock), *to("unique", "users", **sizes))
    there = convert(source, OtherStore(clock), *to("unique", "users", **sizes), drop=True)

    assert rows_of(there, "users") == {key: every[key] for key in kept}
    assert len(kept) < len(keys)
    enough = int(str(refused.value).split("at least ")[1].split()[0])
    [found] = convert_snapshot(
        source, ThirdStore(clock), to("unique", "users", rows=enough, buckets=4), on_read=lambda _: None
    )
    assert (found.rows, found.dropped, found.roomy_rows) == (len(keys), 0, 0)


@pytest.mark.parametrize(
    ("wanted", "hashed", "error", "says"),
    [
        (to("unique", "items"), "modulo", UsageError, "'items': expected one column block"),
        (to("unique", "nobody"), "none", UsageError, "nobody.* users"),
        (to("unique", "ids"), "none", UsageError, "ids: .* unique already"),
        (to("rows", "users"), "none", UsageError, "users: .* row numbers already"),
        (to("unique", "items"), "none", UsageError, "'items': expected one column block"),
        (to("unique", "users", buckets=3), "none", UsageError, "'users': expected a power of two"),
        (to("rows", "ids"), "none", UsageError, r"table ids: id \d+ is not below 500 rows"),
        (to("rows", "ids", buckets=2), "none", UsageError, "ids: .* buckets"),
    ],
    ids=lambda each: "" if isinstance(each, list | type) else str(each)[:12],
)
def test_what_cannot_be_converted_is_refused_by_name(
    clock: Clock, wanted: list[Conversion], hashed: str, error: type[DLRMError], says: str
):
    target = OtherStore(clock)

    with pytest.raises(error, match=says):
        convert(trained(clock, hashed), target, *wanted)

    assert not target.objects


def test_a_snapshot_that_does_not_name_the_hash_is_not_converted(clock: Clock):
    store = MemoryStore(clock)
    commit(store, UniqueModel(TABLES).train(), None)

    with pytest.raises(SnapshotError, match=r"users.* earlier version"):
        convert(find_snapshot(store), OtherStore(clock), *to("unique", "users"))


@pytest.mark.parametrize("left", range(4))
def test_an_interrupted_conversion_leaves_nothing(clock: Clock, monkeypatch: pytest.MonkeyPatch, left: int):
    monkeypatch.setattr("dlrm_checkpointer.write.convert.RUN_BYTES", 1)
    source, target = trained(clock), OtherStore(clock)
    put = target.put

    def interrupted(key: str, body: bytes, sha256: str | None = None) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise KeyboardInterrupt
        put(key, body, sha256)

    target.put = interrupted  # type: ignore[method-assign]

    with pytest.raises(KeyboardInterrupt):
        convert(source, target, *to("unique", "users"))

    assert not target.objects


@pytest.fixture
def committed(files: FileStore) -> FileStore:
    model, name = HashedModel(TABLES), None
    for _ in range(3):
        name = commit(files, model.train(), name)
    return files


def command(files: FileStore, target: Path, *options: str) -> int:
    return app.main(["snapshots", "convert", files.uri, str(target), *options])


def test_the_command_converts_a_step_and_says_what_a_job_must_set(committed: FileStore, tmp_path: Path, capsys):
    target = tmp_path / "unique"

    code = command(committed, target, "--table", "users=unique", "--rows", "users=400", "--buckets", "2", "--step", "2")

    out, err = capsys.readouterr()
    assert code == ExitCode.DONE, err
    assert out.strip() == f"{FileStore(target).uri}/manifests/0000000000000002-00000001.json"
    users = find_snapshot(FileStore(target)).table("users")
    assert (users.rows, users.buckets, users.scale) == (400, 2, 0.25)
    assert "rows: 400, embedding: {hash: unique, buckets: 2}, initializer: {scale: 0.25}" in err
    assert command(committed, target, "--table", "users=unique") == ExitCode.USAGE
    assert "has snapshots of a job already" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--table", "users=mix"], "invalid --table"),
        (["--table", "users"], "invalid --table"),
        (["--table", "users=unique", "--table", "users=fixed"], "invalid --table"),
        (["--table", "users=unique", "--rows", "many"], "invalid --rows"),
        (["--table", "users=unique", "--rows", "items=9"], "invalid --rows"),
        (["--table", "users=unique", "--rows", "0"], "users"),
        ([], "--table"),
    ],
)
def test_invalid_options_are_named(committed: FileStore, tmp_path: Path, capsys, options: list[str], says: str):
    assert command(committed, tmp_path / "out", *options) == ExitCode.USAGE
    assert says in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_store_is_not_converted_into_itself(committed: FileStore, capsys):
    assert command(committed, committed.root, "--table", "users=unique") == ExitCode.USAGE
    assert "another store" in capsys.readouterr().err
