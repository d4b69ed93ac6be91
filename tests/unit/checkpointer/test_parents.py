"""Which snapshot a cut goes on from: what rank 0 answers, and what retention must keep until the cut is committed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dlrm_checkpointer.handoff.cut import CutWithdrawnError
from dlrm_checkpointer.handoff.inbox import Inbox
from dlrm_checkpointer.handoff.writer import HandoffWriter
from dlrm_checkpointer.types import CutMeta, SnapshotName
from dlrm_stores.file import FileStore

RESTORED = SnapshotName(40, 2)


@pytest.mark.parametrize("parent", [None, SnapshotName(7, 3)])
def test_parent_and_time_of_a_cut_survive_json(new_model, parent: SnapshotName | None):
    meta = replace(new_model().meta(2), parent=parent, time=1_700_000_000.25)

    value = meta.to_json()

    assert value["parent"] == (None if parent is None else {"step": 7, "attempt": 3})
    assert CutMeta.from_json(value) == meta


def test_snapshots_are_ordered_by_step_and_then_by_attempt():
    assert SnapshotName(3, 9) < SnapshotName(4, 1) < SnapshotName(4, 2)


def test_the_parent_is_the_attempts_newest_commit_else_the_restored_one(tmp_path: Path):
    writer, inbox = HandoffWriter(tmp_path, 0, None), Inbox(tmp_path, range(1))

    fresh = writer.begin(attempt=3)
    inbox.publish_committed(SnapshotName(50, 2))
    of_another_attempt = writer.begin(attempt=3)
    writer.restored(RESTORED)
    restored = writer.begin(attempt=3)
    inbox.publish_committed(SnapshotName(45, 3))
    inbox.publish_committed(SnapshotName(44, 3))
    committed = writer.begin(attempt=3)

    assert (fresh, of_another_attempt, restored, committed) == (None, None, RESTORED, SnapshotName(45, 3))
    inbox.close()


def test_an_unreadable_parent_is_not_used_until_a_newer_snapshot_exists(tmp_path: Path):
    writer, inbox = HandoffWriter(tmp_path, 0, None), Inbox(tmp_path, range(1))
    writer.restored(RESTORED)

    inbox.broken_parent.write(RESTORED)
    broken, in_flight = writer.begin(attempt=3), inbox.parents_in_flight()
    inbox.publish_committed(SnapshotName(45, 3))
    committed = writer.begin(attempt=3)

    assert (broken, in_flight, committed) == (None, set(), SnapshotName(45, 3))
    assert writer.broken_parent() == RESTORED
    inbox.close()


def test_a_parent_is_in_flight_until_its_cut_is_committed(tmp_path: Path, files: FileStore, new_model, new_pod):
    model, pod = new_model().train(), new_pod(tmp_path / "pod", files)
    writer, inbox = pod.writers[0], Inbox(pod.folder, pod.ranks)
    writer.restored(RESTORED)
    seen = [inbox.parents_in_flight()]

    parent = writer.begin(attempt=3)
    seen.append(inbox.parents_in_flight())
    writer.hand_over(
        replace(model.meta(1, 3), parent=parent), model.pieces(0, 1), model.dense, owned=model.shards(0, 1), timeout_s=1
    )
    seen.append(inbox.parents_in_flight())
    cut = inbox.open(inbox.ready()[0])
    inbox.write_uploaded(cut)
    seen.append(inbox.parents_in_flight())
    inbox.free(cut.name)
    inbox.close()
    again = Inbox(pod.folder, pod.ranks)
    seen.append(again.parents_in_flight())
    again.remove_uploaded(again.uploaded()[0])

    assert seen == [set(), *[{RESTORED}] * 4]
    assert again.parents_in_flight() == set()
    again.close()


@pytest.mark.parametrize("ended", ["given up", "died"])
def test_the_parent_of_a_cut_that_never_came_about_is_let_go_of(
    tmp_path: Path, files: FileStore, new_model, new_pod, ended: str
):
    model, pod = new_model().train(), new_pod(tmp_path / "pod", files, budget_bytes=60_000)
    writer, inbox = pod.writers[0], Inbox(pod.folder, pod.ranks)
    writer.restored(RESTORED)
    parent = writer.begin(attempt=1)

    if ended == "given up":
        with pytest.raises(CutWithdrawnError):
            writer.hand_over(
                replace(model.meta(1), parent=parent),
                model.pieces(0, 1),
                model.dense,
                owned=model.shards(0, 1),
                timeout_s=0,
            )
    else:
        pod.end()
        assert inbox.drop_unfinished() == [0]

    assert inbox.parents_in_flight() == set()
    inbox.close()
