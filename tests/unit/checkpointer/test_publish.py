"""Deltas and their reference consumer: the follower's tables are those of the snapshot that was published last."""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from dlrm_api.errors import (
    DeviceError,
    DLRMError,
    NoPermissionError,
    SnapshotError,
    StoreUnavailableError,
    TemporaryError,
    UsageError,
)
from dlrm_checkpointer.format.attempts import claim_attempt
from dlrm_checkpointer.format.manifest import sealed
from dlrm_checkpointer.publish.delta import newest_delta, read_delta, read_plan, sequences
from dlrm_checkpointer.publish.follower import Follower
from dlrm_checkpointer.read.catalog import find_snapshot, list_snapshots, walk_table
from dlrm_checkpointer.read.restore import Snapshot, open_snapshot, snapshot_keys
from dlrm_checkpointer.types import SnapshotName
from dlrm_stores import ObjectStore
from dlrm_stores.base import ObjectInfo
from dlrm_stores.file import FileStore
from dlrm_testing.repeats import repeats
from dlrm_testing.waiting import wait_until


@pytest.fixture
def target(tmp_path: Path) -> FileStore:
    return FileStore(tmp_path / "deltas")


def tables_of(folder: Path) -> dict[str, Any]:
    """The tables of a follower's folder."""
    state = json.loads((folder / "state.json").read_text())
    assert state["applying"] is None
    image = folder / state["image"]
    found = {path.stem: load_file(path)["weights"] for path in (image / "tables").iterdir()}
    assert sorted(path.name for path in folder.iterdir()) == sorted([state["image"], "state.json"])
    assert sorted(path.name for path in image.iterdir()) == sorted([state["dense"], "tables"])
    return found | {"dense": load_file(image / state["dense"])}


def assert_is(folder: Path, snapshot: Snapshot, bits: int = 32) -> None:
    """The folder holds a snapshot's tables, at a precision."""
    found = tables_of(folder)
    for table in snapshot.meta.tables:
        expected = np.concatenate([block.fill()[0] for block in walk_table(snapshot, table)])
        magnitude = np.abs(expected).max(axis=1, keepdims=True)
        bound = {32: 0.0, 16: 2.0**-11, 8: 1 / 255}[bits] * (magnitude if bits > 8 else 2 * magnitude)
        assert (np.abs(found[table.name] - expected) <= bound + (0 if bits == 32 else 2.0**-24)).all(), table.name
    for name, array in snapshot.dense().items():
        np.testing.assert_array_equal(found["dense"][name], array)


@pytest.mark.parametrize("bits", [8, 16, 32])
@pytest.mark.parametrize("policy", ["full", "one-shot", "consecutive", "intermittent"])
def test_a_follower_has_what_was_published_at_its_precision(
    tmp_path: Path, files: FileStore, target: FileStore, new_model, new_pod, small_tables, policy, bits
):
    model = new_model(small_tables)
    pod = new_pod(tmp_path / "pod", files, policy=policy, target=target, publish_bits=bits, keep_last=1)
    attempt = claim_attempt(files, None, "test")
    follower = Follower(target, tmp_path / "out")
    did = []
    for _ in range(4):
        pod.commit(model.train(), attempt)
        did += follower.catch_up()
        assert_is(tmp_path / "out", find_snapshot(files), bits)

    assert [each.what for each in did] == ["full", "delta", "delta", "delta"]
    assert [each.sequence for each in did] == [1, 2, 3, 4]
    last = did[-1].rows
    assert last == sum((at == 4).sum() for at in model.touched_at.values())
    assert pod.status.registry.get_sample_value("dlrm_checkpointer_published_sequence") == 4
    assert pod.status.registry.get_sample_value("dlrm_checkpointer_published_step") == 4


def test_folders_of_an_image_are_synced_before_the_state_that_names_it(
    tmp_path: Path, files: FileStore, target: FileStore, new_model, new_pod, small_tables, to_disk
):
    new_pod(tmp_path / "pod", files, target=target).commit(new_model(small_tables).train())

    Follower(target, out := tmp_path / "new" / "out").catch_up()

    folders = {path for path in out.rglob("*") if path.is_dir()}
    assert {tmp_path, tmp_path / "new", out, *folders} <= to_disk.synced_before(out / "state.json")
    assert out in to_disk.synced_after(out / "state.json")


@pytest.mark.slow
@pytest.mark.soak
@settings(max_examples=repeats(6, soak=200), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_random_attempts_and_lost_deltas_end_at_the_newest_delta(
    data, tmp_path_factory, new_model, new_pod, small_tables, monkeypatch
):
    monkeypatch.setattr("dlrm_checkpointer.format.chunk.CHUNK_BYTES", data.draw(st.sampled_from([700, 32 << 20])))
    monkeypatch.setattr("dlrm_checkpointer.read.diff.BLOCK_ROWS", data.draw(st.sampled_from([7, 65_536])))
    root = tmp_path_factory.mktemp("lives")
    store, target = FileStore(root / "store"), FileStore(root / "deltas")
    keep_last = data.draw(st.sampled_from([1, 2, 3, 100]))
    committed: list[SnapshotName] = []
    models: dict[SnapshotName, Any] = {}
    lost_ones: set[int] = set()
    followers = [Follower(target, root / f"out{number}") for number in range(2)]
    for life in range(data.draw(st.integers(1, 4))):
        world = data.draw(st.integers(1, 3))
        there = [name for name in committed if store.size(f"manifests/{name.step:016d}-{name.attempt:08d}.json")]
        at = data.draw(st.sampled_from([None, *there[-2:]]))
        model = new_model(small_tables) if at is None else models[at].copy()
        pod = new_pod(
            root / f"pod{life}",
            store,
            world_size=world,
            ranks=range(world),
            policy=data.draw(st.sampled_from(["full", "one-shot", "consecutive", "intermittent"])),
            keep_last=data.draw(st.sampled_from([1, 3])),
            target=target,
            publish_keep_last=keep_last,
        )
        attempt = claim_attempt(store, None if at is None else at.step, "test")
        committed = [name for name in committed if at is not None and name <= at]
        for writer in pod.writers.values():
            writer.restored(at)
        for _ in range(data.draw(st.integers(1, 3))):
            pod.commit(model.train(data.draw(st.integers(1, 2))), attempt)
            name = SnapshotName(model.step, attempt)
            committed.append(name)
            models[name] = model.copy()
            if data.draw(st.booleans()):
                followers[0].catch_up()
                assert_is(root / "out0", open_snapshot(store, *vars(name).values()))
            if data.draw(st.integers(0, 3)) == 0 and len(sequences(target)) > 1:
                _, newest = newest_delta(target)
                lost = data.draw(st.sampled_from(sequences(target)[:-1]))
                if lost < newest.delta.base:
                    lost_ones.add(lost)
                    target.delete(f"deltas/{lost:016d}.json")
        pod.end()
        kept = sequences(target)
        _, newest = newest_delta(target)
        assert set(range(newest.delta.base, newest.delta.sequence + 1)) <= set(kept)
        assert len(kept) <= keep_last

    for number, follower in enumerate(followers):
        follower.catch_up()
        assert_is(root / f"out{number}", open_snapshot(store, *vars(committed[-1]).values()))
    keys = {entry.key for sequence in sequences(target) for entry in objects_of(read_delta(target, sequence).delta)}
    lost_before = {info.key for info in target.list("chunks/") if int(info.key.split("/")[1]) in lost_ones}
    assert {info.key for info in target.list("chunks/")} - lost_before == keys
    assert list(target.list("parts/")) == []


def objects_of(delta: Any) -> list[Any]:
    return [*delta.chunks, *delta.tombstones, delta.dense]


@pytest.mark.parametrize("keep_last", [2, 3])
def test_old_deltas_go_and_a_full_one_replaces_the_oldest_needed(
    tmp_path: Path, files: FileStore, target: FileStore, new_model, new_pod, small_tables, keep_last
):
    model = new_model(small_tables)
    pod = new_pod(tmp_path / "pod", files, policy="consecutive", target=target, publish_keep_last=keep_last)
    attempt = claim_attempt(files, None, "test")
    full, kept = [], []
    for _ in range(7):
        pod.commit(model.train(), attempt)
        full += [newest_delta(target)[1].delta.full]
        kept += [sequences(target)]

    assert full == [number % keep_last == 0 for number in range(7)]
    assert all(each == list(range(max(1, last - keep_last + 1), last + 1)) for last, each in enumerate(kept, 1))


def test_a_gap_is_bridged_by_the_next_full_delta_and_until_then_said(
    tmp_path: Path, files: FileStore, target: FileStore, new_model, new_pod, small_tables
):
    model = new_model(small_tables)
    pod = new_pod(tmp_path / "pod", files, policy="consecutive", target=target, publish_keep_last=4)
    attempt = claim_attempt(files, None, "test")
    follower = Follower(target, tmp_path / "out")
    pod.commit(model.train(), attempt)
    follower.catch_up()
    for _ in range(2):
        pod.commit(model.train(), attempt)
    target.delete("deltas/0000000000000002.json")

    waiting = follower.catch_up()
    for _ in range(2):
        pod.commit(model.train(), attempt)
    bridged = follower.catch_up()

    assert [str(each) for each in waiting] == ["waiting at delta 1, step 1: delta 2 is missing"]
    assert [(each.what, each.sequence, each.why) for each in bridged] == [("full", 5, "delta 2 is missing")]
    assert_is(tmp_path / "out", find_snapshot(files))


def test_a_delta_that_follows_another_history_replaces_the_image(
    tmp_path: Path, files: FileStore, target: FileStore, new_model, new_pod, small_tables
):
    model = new_model(small_tables)
    pod = new_pod(tmp_path / "pod", files, policy="consecutive", target=target)
    attempt = claim_attempt(files, None, "test")
    follower = Follower(target, tmp_path / "out")
    for _ in range(2):
        pod.commit(model.train(), attempt)
    follower.catch_up()
    other = FileStore(tmp_path / "deltas")
    path = other.root / "deltas" / "0000000000000002.json"
    path.write_bytes(sealed({**json.loads(path.read_text()), "time": 2001.0}))
    pod.commit(model.train(), attempt)

    did = follower.catch_up()

    assert [each.what for each in did] == ["full", "delta", "delta"]
    assert did[0].why == "delta 3 follows another delta than the one applied"
    assert_is(tmp_path / "out", find_snapshot(files))


def test_a_corrupt_delta_is_followed_by_a_full_one_that_bridges_it(
    tmp_path: Path, files: FileStore, target: FileStore, new_model, new_pod, small_tables
):
    model = new_model(small_tables)
    pod = new_pod(tmp_path / "pod", files, policy="consecutive", target=target)
    attempt = claim_attempt(files, None, "test")
    pod.commit(model.train(), attempt)
    follower = Follower(target, tmp_path / "out")
    follower.catch_up()
    pod.commit(model.train(), attempt)
    path = target.root / "deltas" / "0000000000000002.json"
    path.write_text(path.read_text().replace('"time":2000.0', '"time":2001.0'))

    waiting = follower.catch_up()
    pod.commit(model.train(), attempt)
    bridged = follower.catch_up()

    assert [(each.what, each.step) for each in waiting] == [("waiting", 1)]
    assert waiting[0].why.endswith("0000000000000002.json: corrupt: its SHA-256 is not its seal")
    assert bridged[0].what == "full"
    assert_is(tmp_path / "out", find_snapshot(files))


class Killed(BaseException):
    """The follower dies here."""


@pytest.mark.slow
def test_a_follower_killed_before_any_write_goes_on_to_the_same_tables(
    tmp_path: Path, files: FileStore, target: FileStore, new_model, new_pod, small_tables
):
    """Enumerated: it dies before its first write, before its second, and so on, then starts again on what is left."""
    tables = tuple(replace(table, rows=min(table.rows, 60)) for table in small_tables)
    attempt = claim_attempt(files, None, "test")
    model = new_model(tables)
    pod = new_pod(tmp_path / "pod", files, policy="consecutive", target=target)
    for steps in (1, 1, 1):
        pod.commit(model.train(steps), attempt)
    pod.end()
    rolled = claim_attempt(files, 1, "back")
    model = new_model(tables).train(1)
    pod = new_pod(tmp_path / "pod2", files, policy="consecutive", target=target)
    pod.writers[0].restored(SnapshotName(1, attempt))
    model.step = 4
    pod.commit(model, rolled)
    assert read_delta(target, 4).delta.tombstones
    expected = find_snapshot(files)

    deaths = 0
    while True:
        left = deaths

        def write() -> None:
            nonlocal left
            if left == 0:
                raise Killed
            left -= 1

        folder = tmp_path / f"out{deaths}"
        try:
            Follower(target, folder, write).catch_up()
            break
        except Killed:
            Follower(target, folder).catch_up()
            assert_is(folder, expected)
            deaths += 1

    assert deaths > 40


def killed_in_delta_two(target: FileStore, folder: Path) -> None:
    """A follower that died amid the rows of delta 2."""
    amid = False

    def write() -> None:
        nonlocal amid
        state = folder / "state.json"
        if amid:
            raise Killed
        amid = state.exists() and json.loads(state.read_text())["applying"] is not None

    with pytest.raises(Killed):
        Follower(target, folder, write).catch_up()
    assert json.loads((folder / "state.json").read_text())["applying"]["sequence"] == 2


@pytest.fixture
def two_deltas(tmp_path: Path, files: FileStore, target: FileStore, new_model, new_pod, small_tables) -> int:
    """Deltas of steps 1 and 2; gives the attempt."""
    model = new_model(small_tables)
    pod = new_pod(tmp_path / "pod", files, policy="consecutive", target=target, keep_last=9)
    attempt = claim_attempt(files, None, "test")
    for _ in range(2):
        pod.commit(model.train(), attempt)
    return attempt


def test_a_delta_that_was_half_applied_and_is_gone_replaces_the_image(
    tmp_path: Path, files: FileStore, target: FileStore, two_deltas: int
):
    killed_in_delta_two(target, tmp_path / "out")
    target.delete("deltas/0000000000000002.json")

    did = Follower(target, tmp_path / "out").catch_up()

    assert [(each.what, each.sequence, each.why) for each in did] == [("full", 1, "delta 2 is missing")]
    assert_is(tmp_path / "out", open_snapshot(files, 1, two_deltas))


def test_a_corrupt_object_is_named_and_the_image_says_that_it_is_not_whole(
    tmp_path: Path, files: FileStore, target: FileStore, two_deltas: int
):
    key = read_delta(target, 2).delta.chunks[-1].key
    body = (target.root / key).read_bytes()
    (target.root / key).write_bytes(body[:-1] + bytes([body[-1] ^ 1]))
    follower = Follower(target, tmp_path / "out")

    with pytest.raises(SnapshotError, match=f"{key}: corrupt"):
        follower.catch_up()
    broken = follower.state
    (target.root / key).write_bytes(body)
    follower.catch_up()

    assert (broken.step, broken.applying.sequence) == (1, 2)
    assert_is(tmp_path / "out", open_snapshot(files, 2, two_deltas))


class Failing:
    """A store that is away while ``away`` is set."""

    def __init__(self, store: FileStore) -> None:
        self._store, self.away = store, threading.Event()

    def __getattr__(self, name: str) -> Any:
        if self.away.is_set() and name != "uri":
            raise StoreUnavailableError("the store is away")
        return getattr(self._store, name)


def test_an_outage_of_the_delta_store_delays_no_commit_and_skips_no_row(
    tmp_path: Path, files: FileStore, target: FileStore, new_model, new_pod, small_tables
):
    """The snapshot that the next delta goes from stays meanwhile, though keepLast is 1."""
    model, failing = new_model(small_tables), Failing(target)
    pod = new_pod(tmp_path / "pod", files, policy="full", target=failing, keep_last=1)
    attempt = claim_attempt(files, None, "test")
    inbox, sidecar = pod.sidecar()
    thread = threading.Thread(target=sidecar.run, args=(threading.Event(),))
    thread.start()

    def commit() -> None:
        pod.cut(model.train(), attempt)
        wait_until(lambda: (model.step, attempt) in snapshot_keys(files))

    commit()
    wait_until(lambda: sequences(target) == [1])
    failing.away.set()
    commit()
    commit()
    wait_until(lambda: snapshot_keys(files) == [(3, attempt), (1, attempt)])
    failing.away.clear()
    commit()
    wait_until(lambda: newest_delta(target)[1].delta.step == 4)
    pod.end()
    thread.join()
    pod.running_publisher.close()
    inbox.close()

    did = Follower(target, tmp_path / "out").catch_up()

    assert "full" not in [each.what for each in did[1:]]
    assert did[0].step == 1
    assert did[1].step > 2
    assert_is(tmp_path / "out", find_snapshot(files))
    assert pod.status.registry.get_sample_value("dlrm_checkpointer_publish_errors_total") > 0


@pytest.mark.slow
def test_a_sidecar_started_in_an_outage_keeps_the_next_deltas_base(
    tmp_path: Path, files: FileStore, target: FileStore, new_model, new_pod, small_tables
):
    model, failing = new_model(small_tables), Failing(target)
    pod = new_pod(tmp_path / "pod", files, policy="full", target=failing, keep_last=1)
    attempt = claim_attempt(files, None, "test")
    pod.commit(model.train(), attempt)
    failing.away.set()
    pod.grace_s = 1
    for _ in range(2):
        pod.commit(model.train(), attempt)
    kept = snapshot_keys(files)
    failing.away.clear()
    pod.grace_s = 30
    pod.commit(model.train(), attempt)

    assert (1, attempt) in kept
    assert [newest_delta(target)[1].delta.step, newest_delta(target)[1].delta.full] == [4, False]
    assert snapshot_keys(files)[0] == (4, attempt)


@pytest.mark.slow
def test_a_sidecar_ends_in_time_while_the_publishers_store_is_away(
    tmp_path: Path, files: FileStore, target: FileStore, new_model, new_pod, small_tables
):
    failing = Failing(target)
    failing.away.set()
    pod = new_pod(tmp_path / "pod", files, target=failing, grace_s=1)

    pod.commit(new_model(small_tables).train(), claim_attempt(files, None, "test"))

    assert find_snapshot(files).step == 1
    assert pod.status.progress.reason.startswith("TrainersEnded")


@pytest.mark.slow
def test_pods_each_put_an_even_share_and_one_makes_the_delta(
    tmp_path: Path, files: FileStore, target: FileStore, new_model, new_pod, small_tables
):
    model = new_model(small_tables)
    pods = [
        new_pod(
            tmp_path / f"pod{number}",
            files,
            world_size=4,
            ranks=range(2 * number, 2 * number + 2),
            target=target,
            policy="consecutive",
        )
        for number in range(2)
    ]
    attempt = claim_attempt(files, None, "test")
    parent = None
    for _ in range(3):
        model.train()
        for pod in pods:
            for rank in pod.ranks:
                pod.cut_of(rank, model, attempt, parent=parent)
        parent = SnapshotName(model.step, attempt)
        threads = [threading.Thread(target=pod.finish) for pod in pods]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for pod in pods:
            pod.open()

    did = Follower(target, tmp_path / "out").catch_up()

    assert [(each.what, each.step) for each in did] == [("full", 1), ("delta", 2), ("delta", 3)]
    assert_is(tmp_path / "out", find_snapshot(files))
    delta = read_delta(target, 3).delta
    assert {chunk.key.split("/")[3] for chunk in delta.chunks} == {"000000", "000001"}
    assert len({chunk.key.split("/")[2] for chunk in delta.chunks}) == 1


def test_a_previous_snapshot_that_is_damaged_makes_the_next_delta_full(
    tmp_path: Path, files: FileStore, target: FileStore, new_model, new_pod, small_tables
):
    model = new_model(small_tables)
    pod = new_pod(tmp_path / "pod", files, policy="full", target=target, keep_last=9)
    attempt = claim_attempt(files, None, "test")
    pod.commit(model.train(), attempt)
    broken = find_snapshot(files)
    pod.target = None
    pod.commit(model.train(), attempt)
    path = files.root / broken.manifest.chunks[0].key
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    pod.target = target
    pod.policy = "one-shot"
    pod.commit(model.train(), attempt)

    did = Follower(target, tmp_path / "out").catch_up()

    assert (did[0].what, did[0].sequence) == ("full", 2)
    assert_is(tmp_path / "out", find_snapshot(files))


def test_deltas_go_on_where_the_jobs_store_was_replaced(
    tmp_path: Path, files: FileStore, target: FileStore, new_model, new_pod, small_tables
):
    """Steps and attempts of the store before were greater: they say nothing of the new one's."""
    for store, steps in ((FileStore(tmp_path / "before"), 3), (files, 1)):
        model = new_model(small_tables)
        pod = new_pod(tmp_path / f"pod{steps}", store, policy="consecutive", target=target)
        attempt = claim_attempt(store, None, "test")
        for _ in range(steps):
            pod.commit(model.train(), attempt)
        pod.end()

    did = Follower(target, tmp_path / "out").catch_up()

    assert [(each.what, each.sequence, each.step) for each in did] == [("full", 4, 1)]
    assert_is(tmp_path / "out", find_snapshot(files))


@pytest.mark.slow
def test_a_publisher_killed_at_any_write_goes_on_to_the_same_tables(
    tmp_path: Path, new_model, new_pod, dying, small_tables
):
    """Enumerated: its store answers nothing more after one write, after two, and so on; then it starts again."""

    class Dead(dying):
        def _alive(self) -> None:
            if self.writes_left < 0:
                raise NoPermissionError("gone for good: nobody waits for it")

    tables = tuple(replace(table, rows=min(table.rows, 20)) for table in small_tables[:2])
    deaths = 0
    while True:
        root = tmp_path / str(deaths)
        store, target = FileStore(root / "store"), FileStore(root / "deltas")
        model, attempt = new_model(tables), claim_attempt(store, None, "test")
        pod = new_pod(root / "pod", store, policy="consecutive", target=target, publish_keep_last=2)
        for _ in range(2):
            pod.commit(model.train(), attempt)
        pod.target = Dead(target, deaths)
        pod.commit(model.train(), attempt)
        survived = pod.target.writes_left >= 0
        pod.target = target
        pod.commit(model.train(), attempt)

        Follower(target, root / "out").catch_up()

        assert_is(root / "out", find_snapshot(store))
        assert len(sequences(target)) == 2
        keys = {e.key for number in sequences(target) for e in objects_of(read_delta(target, number).delta)}
        assert {info.key for info in target.list("chunks/")} == keys
        if survived:
            break
        deaths += 1

    assert deaths > 5


def test_no_object_of_a_delta_is_put_while_a_cut_is_stored(
    tmp_path: Path, files: FileStore, target: FileStore, new_model, new_pod, small_tables
):
    pod = new_pod(tmp_path / "pod", files)
    attempt = claim_attempt(files, None, "test")
    pod.commit(new_model(small_tables).train(), attempt)
    pod.target = target
    publisher = pod.publisher()

    with publisher.held_back():
        publisher.offer(SnapshotName(1, attempt))
        wait_until(lambda: read_plan(target) is not None)
        time.sleep(0.2)
        during = list(target.list("chunks/"))
    wait_until(lambda: sequences(target) == [1])
    publisher.close()

    assert during == []


class Unlisted(FileStore):
    """A store of deltas that nobody may look into, or that is away."""

    problem: DLRMError = NoPermissionError("no listing")

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        raise self.problem


def test_a_job_does_not_wait_for_a_delta_store_that_refuses_listings(
    tmp_path: Path, files: FileStore, new_model, new_pod, small_tables
):
    pod = new_pod(tmp_path / "pod", files, target=Unlisted(tmp_path / "deltas"), grace_s=3_600.0)

    pod.commit(new_model(small_tables).train())

    assert pod.running_publisher.settled


@pytest.mark.slow
@pytest.mark.parametrize("problem", [NoPermissionError("no listing"), StoreUnavailableError("gone")])
@pytest.mark.parametrize(("timeout_s", "left"), [(3_600.0, [4, 3, 2, 1]), (0.0, [4])])
def test_retention_waits_a_bounded_time_for_a_delta_store_that_is_down(
    tmp_path: Path, files: FileStore, new_model, new_pod, small_tables, problem, timeout_s, left, caplog
):
    model, target = new_model(small_tables), Unlisted(tmp_path / "deltas")
    target.problem = problem
    pod = new_pod(tmp_path / "pod", files, keep_last=1, target=target, orphan_s=timeout_s, grace_s=0.5)
    attempt = claim_attempt(files, None, "test")

    for _ in range(4):
        pod.commit(model.train(), attempt)

    assert [each.step for each in list_snapshots(files)] == left
    assert ("although deltas cannot be read" in caplog.text) == (len(left) == 1)


def test_a_delta_is_full_if_its_base_was_retired_in_an_outage(
    tmp_path: Path, files: FileStore, target: FileStore, new_model, new_pod, small_tables
):
    model, attempt = new_model(small_tables), claim_attempt(files, None, "test")
    pod = new_pod(tmp_path / "pod", files, keep_last=1, target=target, orphan_s=0.0, grace_s=0.5)
    pod.commit(model.train(), attempt)
    pod.target = Unlisted(target.root)
    for _ in range(2):
        pod.commit(model.train(), attempt)
    pod.target, pod.grace_s = target, 30.0
    pod.commit(model.train(), attempt)

    did = Follower(target, tmp_path / "out").catch_up()

    assert (did[0].what, did[0].sequence, did[-1].step) == ("full", 2, 4)
    assert_is(tmp_path / "out", find_snapshot(files))


def test_two_followers_of_one_folder_take_turns_and_never_mix_deltas(
    tmp_path: Path, files: FileStore, target: FileStore, new_model, new_pod, small_tables
):
    model, attempt = new_model(small_tables), claim_attempt(files, None, "test")
    pod = new_pod(tmp_path / "pod", files, policy="consecutive", target=target)
    pod.commit(model.train(), attempt)
    second = Follower(target, tmp_path / "out")
    turned_away = []

    def meanwhile() -> None:
        with pytest.raises(TemporaryError, match="another follower is at work in this folder") as caught:
            second.catch_up()
        turned_away.append(caught.value)

    first = Follower(target, tmp_path / "out", meanwhile)
    first.catch_up()
    pod.commit(model.train(), attempt)
    first.catch_up()
    said = second.catch_up()

    assert turned_away
    assert said == []
    assert_is(tmp_path / "out", find_snapshot(files))


def test_an_image_that_is_gone_is_made_again(tmp_path: Path, target: FileStore, files: FileStore, two_deltas: int):
    follower = Follower(target, tmp_path / "out")
    follower.catch_up()
    shutil.rmtree(tmp_path / "out" / follower.state.image)

    did = Follower(target, tmp_path / "out").catch_up()

    assert [each.what for each in did] == ["full", "delta"]
    assert_is(tmp_path / "out", find_snapshot(files))


@pytest.mark.parametrize("state", [b"\xff\xfe{", b"{}", b"[]", b"OTHER FORMAT", b"OTHER VERSION"])
def test_a_state_that_no_such_follower_wrote_is_refused(
    tmp_path: Path, target: FileStore, two_deltas: int, state: bytes
):
    Follower(target, tmp_path / "out").catch_up()
    path = tmp_path / "out" / "state.json"
    written = path.read_bytes()
    others = {
        b"OTHER FORMAT": written.replace(b"dlrm-image", b"dlrm-map"),
        b"OTHER VERSION": written.replace(b'"version": 1', b'"version": 2'),
    }
    path.write_bytes(others.get(state, state))

    with pytest.raises(UsageError, match=r"state\.json: is no follower's state: give a new folder"):
        Follower(target, tmp_path / "out")


@pytest.mark.parametrize("folder", ["file/out", "a" * 300])
def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path, target: FileStore, two_deltas: int, folder: str):
    (tmp_path / "file").write_bytes(b"x")

    with pytest.raises(UsageError, match=f"{folder}: cannot be written: .*: give another folder"):
        Follower(target, tmp_path / folder)


def test_a_full_disk_is_told_before_rows_are_written_to_it(
    tmp_path: Path, target: FileStore, two_deltas: int, monkeypatch: pytest.MonkeyPatch
):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)

    with pytest.raises(
        DeviceError, match=r"write \d+ bytes to .*/tables/users.safetensors: No space left on device; free space there"
    ):
        Follower(target, tmp_path / "out").catch_up()


def test_foreign_objects_stay_and_hold_no_delta_back(
    tmp_path: Path, files: FileStore, target: FileStore, new_model, new_pod, small_tables
):
    model, attempt = new_model(small_tables), claim_attempt(files, None, "test")
    pod = new_pod(tmp_path / "pod", files, target=target)
    target.put("chunks/.nfs0001", b"theirs")
    target.put("parts/notes.txt", b"theirs")

    for _ in range(2):
        pod.commit(model.train(), attempt)

    assert sequences(target) == [1, 2]
    assert target.get("chunks/.nfs0001") == target.get("parts/notes.txt") == b"theirs"


def test_a_folder_that_holds_something_else_is_left_alone(tmp_path: Path, target: FileStore):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("x")

    with pytest.raises(UsageError, match="holds something else"):
        Follower(target, tmp_path / "out")


def test_every_kind_of_store_takes_deltas_and_gives_them_back(
    tmp_path: Path, files: FileStore, store: ObjectStore, new_model, new_pod, small_tables
):
    model, pod = new_model(small_tables), new_pod(tmp_path / "pod", files, target=store, publish_keep_last=2)
    attempt = claim_attempt(files, None, "test")
    follower, did = Follower(store, tmp_path / "out"), []
    for _ in range(3):
        pod.commit(model.train(), attempt)
        did += follower.catch_up()

    assert [(each.what, each.sequence) for each in did] == [("full", 1), ("delta", 2), ("full", 3)]
    assert sequences(store) == [2, 3]
    assert_is(tmp_path / "out", find_snapshot(files))
