from __future__ import annotations

import errno
import os
import sys
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from dlrm_api.errors import DeviceError, InvalidSpecError
from dlrm_api.model import TableSpec
from dlrm_api.plan import TierLevel, TierShare
from dlrm_api.tiers import BLOCK_SLACK, Tier
from dlrm_checkpointer.codec.initializer import initial_rows
from dlrm_checkpointer.codec.rows import code_rows
from dlrm_checkpointer.types import ShardRows, load_rows
from dlrm_kernels import row_cache
from dlrm_kernels.replacement import SIZE
from dlrm_kernels.row_cache import ACCESSES, CREATED, EVICTED, HITS, SCRATCH
from dlrm_testing.trainer.directory_rules import directories_on_hosts
from dlrm_trainer.embedding.changes import DirtyPart, DirtyRows
from dlrm_trainer.embedding.checkpoint import StackedPart, rows_of_stack, table_meta
from dlrm_trainer.embedding.gpu.stack import GpuStack
from dlrm_trainer.embedding.tiers import stack as stack_module
from dlrm_trainer.embedding.tiers.block import BlockLevel
from dlrm_trainer.embedding.tiers.memory import AnonymousStorage, ByteLevel, MappedStorage
from dlrm_trainer.embedding.tiers.prefetch import Prefetcher
from dlrm_trainer.embedding.tiers.slots import DeviceSlots, HostSlots, Level, Records, untouched_zeros
from dlrm_trainer.embedding.tiers.stack import Stack, StackLookups, StackTable

pytestmark = pytest.mark.usefixtures("directories")
DIM, SEED, SCALE = 4, 7, 0.25
Ids = NDArray[np.int64]


@pytest.fixture
def directories() -> Iterator[None]:
    """Has directories of GPUs work on hosts."""
    with directories_on_hosts():
        yield


class Tables:
    """Some tables over a stack, and every row's expected value: its initial one plus its updates."""

    def __init__(
        self,
        rows: list[int],
        slots: int,
        tiers: tuple[Tier, ...],
        folder: Path,
        *,
        policy: str = "lru",
        ways: int = 0,
        extra: int = 200,
        segment_bytes: int = 4_096,
        staged: bool = False,
    ) -> None:
        self.rows, self.slots = rows, slots
        members = [StackTable(name=f"t{k}", rows=n, slots=slots, extra=extra, scale=SCALE) for k, n in enumerate(rows)]
        self.weight = torch.zeros(len(rows) * (slots + extra), DIM)
        self.state = torch.zeros(len(rows) * (slots + extra), 1)
        below = tuple(
            TierLevel(tier=tier, rows=10 if n + 1 < len(tiers) else max(rows)) for n, tier in enumerate(tiers)
        )
        share = TierShare.model_validate(
            {"levels": [TierLevel(tier="ddr", rows=slots), *below], "policy": policy, "ways": ways}
        )
        if staged:
            memory = DeviceSlots(self.weight, self.state, stack_module.QUEUED_CHUNK)
            self.stack: Stack = GpuStack(members, share, memory, SEED, DIM, "fp32")
        else:
            self.stack = Stack(members, share, HostSlots(self.weight, self.state), SEED, DIM, "fp32")
        self.stack.attach([self._level(tier, n, len(tiers), folder, segment_bytes) for n, tier in enumerate(tiers)])
        self.updates = [np.zeros(n, np.int64) for n in rows]
        self.batches = 0

    def _level(self, tier: Tier, number: int, count: int, folder: Path, segment_bytes: int) -> Level:
        total, words = sum(self.rows), self.stack.memory.words
        places = total if number + 1 == count else 10 * len(self.rows)
        if tier == "block":

            def moved(rows: Ids, at: Ids) -> None:
                self.stack.relocated(number + 1, rows, at)

            return BlockLevel(folder, words, int(places * BLOCK_SLACK), places, moved, segment_bytes)
        storage = AnonymousStorage(words, places) if tier == "ddr" else MappedStorage(folder, words, places, tier)
        return ByteLevel(tier, storage, places, ordered=number + 1 < count)

    def lookups(self, ids: list[Ids]) -> tuple[Ids, Ids]:
        return np.concatenate(ids), np.cumsum([len(each) for each in ids])

    def check(self, ids: list[Ids], slots: Ids) -> None:
        """The slots hold the rows that were asked for, as they ought to be."""
        ends, first = np.cumsum([len(each) for each in ids]), 0
        for table, (mine, end) in enumerate(zip(ids, ends.tolist(), strict=True)):
            at = slots[first:end] + int(self.stack.row_map.slot_starts[table])
            if np.abs(self.updates[table][mine]).max(initial=0) < 2**20:
                values = self.weight.numpy()[at] - initial_rows(SEED, f"t{table}", mine, range(DIM), SCALE)
                assert np.array_equal(
                    np.rint(values).astype(np.int64), np.repeat(self.updates[table][mine, None], DIM, 1)
                )
            assert np.array_equal(self.state.numpy()[at, 0], self.updates[table][mine])
            first = end

    def update(self, ids: list[Ids], slots: Ids) -> None:
        """Add one to every distinct row, and count it in its state."""
        first = 0
        for table, mine in enumerate(ids):
            at = np.unique(slots[first : first + len(mine)]) + int(self.stack.row_map.slot_starts[table])
            self.weight.numpy()[at] += 1
            self.state.numpy()[at] += 1
            self.updates[table][np.unique(mine)] += 1
            first += len(mine)

    def train(self, ids: list[Ids], batch: int) -> None:
        """One batch, from its fetch to its release."""
        fetched = self.stack.fetch(*self.lookups(ids), batch)
        self.check(ids, fetched.slots.numpy())
        self.update(ids, fetched.slots.numpy())
        self.stack.release(fetched)

    def places_agree(self) -> None:
        """Every known row is in one place, and every place holds one row."""
        entries = self.stack.row_map.place_of.astype(np.int64)
        entries = entries[entries > 0] - 1
        assert len(np.unique(entries)) == len(entries)
        for number, level in enumerate(self.stack.levels, start=1):
            assert (entries & 3 == number).sum() == level.used


def move_at_a_time(patched: pytest.MonkeyPatch, rows: int) -> None:
    """Have stacks that are made from now on move so many rows at a time."""
    patched.setattr(stack_module, "CHUNK", rows)
    patched.setattr(stack_module, "QUEUED_CHUNK", rows)


tier_stacks: st.SearchStrategy[tuple[Tier, ...]] = st.sampled_from(
    [("ddr",), ("scm",), ("block",), ("ddr", "block"), ("ddr", "scm", "block")]
)


@pytest.mark.slow
@given(
    data=st.data(),
    tiers=tier_stacks,
    slots=st.integers(1, 40),
    policy=st.sampled_from(["lru", "lfu", "mixed"]),
    ways=st.sampled_from([0, 2, 8]),
    depth=st.integers(0, 2),
    staged=st.booleans(),
    chunk=st.sampled_from([7, 4_096]),
)
@settings(max_examples=90, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_batch_finds_its_rows_as_updates_left_them(
    tmp_path: Path,
    data: st.DataObject,
    tiers: tuple[Tier, ...],
    slots: int,
    policy: str,
    ways: int,
    depth: int,
    staged: bool,
    chunk: int,
) -> None:
    with pytest.MonkeyPatch.context() as patched:
        move_at_a_time(patched, chunk)
        tables = Tables([60, 90], slots, tiers, tmp_path, policy=policy, ways=ways, staged=staged)
    generator = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    ahead = []
    for batch in range(1, 25):
        ids = [generator.integers(0, n, generator.integers(0, 30)) for n in tables.rows]
        ahead.append((ids, tables.stack.fetch(*tables.lookups(ids), batch)))
        if len(ahead) <= depth:
            continue
        ids, fetched = ahead.pop(0)
        tables.check(ids, fetched.slots.numpy())
        tables.update(ids, fetched.slots.numpy())
        tables.stack.release(fetched)
        if batch % 3 == 0:
            seen = [generator.integers(0, n, 20) for n in tables.rows]
            before = tables.stack.row_map.place_of.copy()
            borrowed = tables.stack.borrow(*tables.lookups(seen))
            tables.check(seen, borrowed.slots.numpy())
            tables.stack.give_back(borrowed)
            assert np.array_equal(before, tables.stack.row_map.place_of)
        tables.places_agree()
    for table, rows in enumerate(tables.rows):
        records = tables.stack.read(np.arange(rows) + int(tables.stack.row_map.row_starts[table]))
        assert np.array_equal(tables.stack.format.values(records)[1][:, 0], tables.updates[table])
    tables.stack.close()


@given(seed=st.integers(0, 2**32), slots=st.integers(1, 50))
@settings(max_examples=30)
def test_lru_hits_evictions_and_created_rows_are_those_of_a_simulation(seed: int, slots: int) -> None:
    generator = np.random.default_rng(seed)
    tables = Tables([100], slots, ("ddr",), Path())
    cache: OrderedDict[int, None] = OrderedDict()
    known: set[int] = set()
    hits = accesses = evictions = created = 0
    for batch in range(1, 40):
        ids = np.unique(generator.integers(0, 100, generator.integers(1, slots + 1))[:slots])

        tables.stack.release(tables.stack.fetch(ids, np.array([len(ids)]), batch))

        found = [row for row in ids.tolist() if row in cache]
        missing = [row for row in ids.tolist() if row not in cache]
        for row in found:
            cache.move_to_end(row)
        for row in missing:
            if len(cache) == slots:
                cache.popitem(last=False)
                evictions += 1
            cache[row] = None
        hits, accesses = hits + len(found), accesses + len(ids)
        created += len(set(missing) - known)
        known |= set(missing)
    stats = tables.stack.row_map.stats[0]
    assert (stats[HITS], stats[ACCESSES], stats[EVICTED], stats[CREATED]) == (hits, accesses, evictions, created)
    assert stats[SCRATCH] == 0


@pytest.mark.parametrize("tiers", [("ddr", "scm"), ("ddr", "scm", "block")])
def test_rows_that_make_room_below_for_others_of_their_batch_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiers: tuple[Tier, ...]
) -> None:
    move_at_a_time(monkeypatch, 5)
    tables = Tables([80], 12, tiers, tmp_path)
    generator = np.random.default_rng(0)

    for batch in range(1, 60):
        tables.train([generator.integers(0, 80, 40)], batch)
        tables.places_agree()


def test_rows_that_a_level_moves_while_they_are_on_their_way_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    move_at_a_time(monkeypatch, 50)
    tables = Tables([4_000], 400, ("block",), tmp_path, extra=600)
    generator = np.random.default_rng(0)

    for batch in range(1, 120):
        tables.train([generator.integers(0, 4_000, 500)], batch)

    level = tables.stack.levels[0]
    assert isinstance(level, BlockLevel)
    assert level.cleaned > 10_000


def test_slots_beyond_32_bits_are_found_also_with_few_rows() -> None:
    members = [StackTable(name=name, rows=9, slots=n, extra=4, scale=SCALE) for name, n in (("a", 2**29), ("b", 4))]
    slots = sum(table.slots + table.extra for table in members)
    weight, state = (torch.from_numpy(untouched_zeros(slots, np.float32)).view(slots, 1) for _ in range(2))
    share = TierShare.model_validate({"levels": [TierLevel(tier="ddr", rows=2**29), TierLevel(tier="ddr", rows=9)]})
    stack = Stack(members, share, HostSlots(weight, state), SEED, 1, "fp32")
    stack.attach([ByteLevel("ddr", AnonymousStorage(stack.memory.words, 18), 18, ordered=False)])

    fetched = stack.fetch(np.array([1, 8, 2]), np.array([1, 3]), 1)

    assert fetched.slots.tolist() == [0, 0, 1]
    assert fetched.distinct.tolist() == [0, 2**29 + 4, 2**29 + 5]
    again = stack.fetch(np.array([1, 2, 8]), np.array([1, 3]), 2)
    assert again.slots.tolist() == [0, 1, 0]
    stack.close()


@pytest.mark.parametrize("policy", ["lru", "lfu", "mixed"])
@pytest.mark.parametrize("ways", [0, 4])
def test_rows_of_a_batch_in_flight_are_never_victims(policy: str, ways: int) -> None:
    tables = Tables([200], 16, ("ddr",), Path(), policy=policy, ways=ways)
    held = np.arange(12)
    first = tables.stack.fetch(held, np.array([12]), 1)

    for batch in range(2, 20):
        other = np.arange(20, 60) + batch
        tables.stack.release(tables.stack.fetch(other, np.array([40]), batch))

    again = tables.stack.fetch(held, np.array([12]), 20)
    assert np.array_equal(first.slots.numpy(), again.slots.numpy())


def test_lfu_keeps_what_is_used_often_and_lru_what_was_used_last() -> None:
    kept = {}
    for policy in ("lru", "lfu", "mixed"):
        tables = Tables([100], 10, ("ddr",), Path(), policy=policy)
        often, batch = np.arange(5), 0
        for _ in range(4):
            batch += 1
            tables.stack.release(tables.stack.fetch(often, np.array([5]), batch))
        for row in range(20, 40):
            batch += 1
            tables.stack.release(tables.stack.fetch(np.array([row]), np.array([1]), batch))
        kept[policy] = {int(row) for row in np.flatnonzero((tables.stack.row_map.place_of - 1) & 3 == 0)}

    assert kept["lru"] == set(range(30, 40))
    assert set(range(5)) <= kept["lfu"]
    assert set(range(5)) <= kept["mixed"]


def test_mixed_protects_rows_looked_up_twice_in_four_fifths_of_the_slots() -> None:
    tables = Tables([100, 100], 10, ("ddr",), Path(), policy="mixed")
    lists, generator = tables.stack.row_map.replacement.lists, np.random.default_rng(5)
    most_protected = np.zeros(2, np.int64)

    for batch in range(1, 60):
        ids = [generator.integers(0, 12, 30), generator.integers(0, 100, 10)]
        tables.stack.release(tables.stack.fetch(*tables.lookups(ids), batch))
        most_protected = np.maximum(most_protected, lists[:, 1, SIZE])
        assert (lists[:, :, SIZE].sum(axis=1) == tables.stack.row_map.filled[:, 0]).all()

    assert most_protected[0] == 8
    assert most_protected[1] <= 8


def changed_views(tables: Tables) -> list[StackedPart]:
    """The tables as parts of their stack after some batches, with what these updated marked."""
    generator = np.random.default_rng(3)
    for batch in range(1, 15):
        ids = [generator.integers(0, n, 60) for n in tables.rows]
        fetched = tables.stack.fetch(*tables.lookups(ids), batch)
        tables.update(ids, fetched.slots.numpy())
        tables.stack.release(fetched)
    tables.stack.fetch(*tables.lookups([np.arange(60), np.arange(60)]), 15)  # of the next batch: not to be saved
    dirty = DirtyRows(tables.rows)
    views = []
    for k, updates in enumerate(tables.updates):
        spec, part = TableSpec(name=f"t{k}", rows=tables.rows[k], dim=DIM), DirtyPart(dirty, k)
        part.mark(np.flatnonzero(updates))
        views.append(StackedPart(spec, table_meta(spec, 0, "rowwise-adagrad").whole(), tables.stack, k, part))
    return views


@pytest.mark.parametrize("scan_share", [0, np.inf])
def test_rows_on_block_storage_are_read_for_a_snapshot_in_bounded_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scan_share: float
) -> None:
    tables, most = Tables([300, 500], 20, ("ddr", "block"), tmp_path), 32
    views = changed_views(tables)
    monkeypatch.setattr("dlrm_trainer.embedding.checkpoint.SCAN_SHARE", scan_share)
    monkeypatch.setattr("dlrm_trainer.embedding.checkpoint.SCAN_BYTES", most * 4 * tables.stack.memory.words)

    read = [len(piece.row_ids) for piece in rows_of_stack(tables.stack, views) if isinstance(piece, ShardRows)]

    assert sum(read) > 4 * most
    assert max(read) < 2 * most


@pytest.mark.parametrize("scan_share", [0, np.inf])
@pytest.mark.parametrize("first", [("ddr",), ("ddr", "block")])
@pytest.mark.parametrize("second", [("scm",), ("block",), ("ddr", "scm", "block")])
def test_a_snapshot_fills_another_stack_with_the_same_rows(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    first: tuple[Tier, ...],
    second: tuple[Tier, ...],
    scan_share: float,
) -> None:
    tables, other = Tables([300, 500], 20, first, tmp_path), Tables([300, 500], 45, second, tmp_path, ways=4)
    views = changed_views(tables)
    others = [StackedPart(view.table, view.shard, other.stack, k, view.dirty) for k, view in enumerate(views)]
    monkeypatch.setattr("dlrm_trainer.embedding.checkpoint.SCAN_SHARE", scan_share)
    pieces = [load_rows(each) for each in rows_of_stack(tables.stack, views)]
    for k, spec in enumerate(view.table for view in views):
        mine = [piece for piece in pieces if piece.shard.table == spec.name]
        others[k].restore(code_rows(piece, 32)[0] for piece in mine)

        saved = np.concatenate([piece.row_ids for piece in mine])
        assert sorted(saved.tolist()) == np.flatnonzero(tables.updates[k]).tolist()
        for a, b in zip(views[k].read_block(0, spec.rows), others[k].read_block(0, spec.rows), strict=True):
            assert np.array_equal(a, b)
    other.places_agree()


def test_after_an_error_every_request_fails_with_it_and_the_thread_ends(tmp_path: Path) -> None:
    tables = Tables([100], 5, ("scm",), tmp_path)
    ahead = Prefetcher([tables.stack])
    ids = np.arange(40)
    ahead.release(ahead.fetch([StackLookups(ids, np.array([40]))], 1).result())
    ahead.settle()

    def broken(*_: object) -> None:
        raise DeviceError("cannot read 24 bytes at 0 of /mnt/scm: Input/output error")

    tables.stack.levels[0].read = broken  # type: ignore[assignment,method-assign]
    fetched = ahead.fetch([StackLookups(ids, np.array([40]))], 2)
    with pytest.raises(DeviceError, match="cannot read 24 bytes at 0 of /mnt/scm"):
        fetched.result()
    with pytest.raises(DeviceError, match="Input/output error"):
        ahead.settle()
    ahead.close()


def test_a_batch_that_finds_too_few_slots_waits_for_those_before_it() -> None:
    tables = Tables([100], 8, ("ddr",), Path(), staged=True, extra=40)
    ahead = Prefetcher([tables.stack])
    batches = [np.arange(start, start + 18) for start in (0, 20, 40)]
    lookups = [[StackLookups(ids, np.array([18]))] for ids in batches]

    first, second, third = (ahead.fetch(each, number) for number, each in enumerate(lookups, start=1))
    ahead.settle()

    assert (first.done(), second.done(), third.done()) == (True, False, False)
    for ids, fetched in zip(batches, (first, second, third), strict=True):
        (got,) = fetched.result(timeout=60)
        tables.check([ids], got.slots.numpy())
        tables.update([ids], got.slots.numpy())
        ahead.release([got])
    ahead.settle()
    ahead.close()
    tables.places_agree()


def test_rows_dropped_from_slots_of_a_gpu_are_nowhere_and_leave_them_free() -> None:
    tables, gone = Tables([60, 90], 20, ("ddr",), Path(), staged=True), np.arange(5, 25)
    for batch in (1, 2, 3):
        tables.train([np.arange(batch * 10), np.arange(batch * 10)], batch)

    tables.stack.drop(1, gone)
    tables.updates[1][gone] = 0

    tables.places_agree()
    assert not np.isin(gone + 60, tables.stack.known(1, 0, 90)).any()
    for batch in (4, 5):
        tables.train([np.arange(60), np.arange(90)], batch)
    tables.places_agree()


def test_a_batch_with_more_rows_than_slots_is_refused_with_the_field_to_change() -> None:
    tables = Tables([100], 8, ("ddr",), Path(), staged=True, extra=10)
    ahead = Prefetcher([tables.stack])

    fetched = ahead.fetch([StackLookups(np.arange(30), np.array([30]))], 1)
    later = ahead.fetch([StackLookups(np.arange(3), np.array([3]))], 2)

    for each in (fetched, later):
        with pytest.raises(InvalidSpecError, match=r"table t0: batch 1 finds no slot in HBM for 12 .*avgLookups"):
            each.result(timeout=60)
    ahead.close()


@pytest.mark.skipif(sys.platform != "linux", reason="turns of threads are Linux's")
def test_only_a_thread_that_just_copies_runs_in_gaps(tmp_path: Path) -> None:
    classes = []
    cases: list[tuple[Tier, bool]] = [("ddr", False), ("block", False), ("ddr", True)]
    for tier, staged in cases:
        tables = Tables([100], 5, (tier,), tmp_path, staged=staged)
        ahead = Prefetcher([tables.stack])
        classes.append(ahead._submit(lambda: os.sched_getscheduler(0)).result())
        ahead.close()
        tables.stack.close()

    assert classes == [os.SCHED_IDLE, os.SCHED_OTHER, os.SCHED_OTHER]


def test_rows_are_fetched_if_the_kernel_refuses_the_idle_class(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    caplog.set_level("INFO", logger="dlrm_trainer")
    tables = Tables([100], 5, ("ddr",), tmp_path)
    ahead = Prefetcher([tables.stack])

    fetched = ahead.fetch([StackLookups(np.array([7], np.int64), np.array([1]))], 1).result()

    ahead.close()
    tables.stack.close()
    assert len(fetched[0].slots) == 1
    (told,) = [record for record in caplog.records if "SCHED_IDLE" in record.message]
    assert vars(told)["error"] == "[Errno 1] Operation not permitted"


def test_bytes_kept_are_those_of_the_rows_that_were_stored(tmp_path: Path) -> None:
    tables = Tables([20_000], 2_000, ("scm",), tmp_path, extra=4_000)
    generator = np.random.default_rng(1)

    for batch in range(1, 60):
        ids = [generator.integers(0, 20_000, 1_500)]
        tables.stack.release(tables.stack.fetch(*tables.lookups(ids), batch))

    kept = tables.stack.bytes_kept
    stored = len(np.unique(np.flatnonzero(tables.stack.row_map.place_of)))
    assert kept["scm"] >= (stored - 2_000) * 24
    assert kept["ddr"] == pytest.approx(2_000 * (20 + 32) + 20_000 * 4 + (stored - 2_000) * 4, rel=0.05)


def test_rows_go_to_a_gpu_in_large_copies_and_to_the_host_in_small_ones() -> None:
    copies: dict[bool, list[int]] = {False: [], True: []}
    for staged, counts in copies.items():
        tables = Tables([20_000], 12_000, ("ddr",), Path(), staged=staged, extra=12_000)
        scatter = tables.stack.memory.scatter

        def counted(slots: Ids, records: Records, counts: list[int] = counts, scatter: Any = scatter) -> None:
            counts.append(len(slots))
            scatter(slots, records)

        tables.stack.memory.scatter = counted  # type: ignore[method-assign]
        tables.stack.fetch(*tables.lookups([np.arange(12_000)]), 1)

    assert copies == {False: [4_096, 4_096, 3_808], True: [12_000]}


def test_rows_listed_in_the_order_of_their_places_keep_their_values(
    direct_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed, order_by_page = list[bool](), row_cache.order_by_page

    def observed(*given: Any) -> None:
        order_by_page(*given)
        listed.append(bool(np.any(np.diff(given[-1]) < 0)))

    monkeypatch.setattr(row_cache, "order_by_page", observed)
    random = np.random.default_rng(3)
    tables = Tables([6_000, 5_000], 300, ("block",), direct_folder, policy="mixed", extra=2_500)
    for batch in range(1, 13):
        tables.train([random.permutation(rows)[:2_000] for rows in tables.rows], batch)
    tables.places_agree()
    assert any(listed), "no batch was reordered"
