from __future__ import annotations

from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from dlrm_checkpointer.attempts import Attempt, claim_attempt, in_lineage
from dlrm_checkpointer.catalog import list_snapshots
from dlrm_checkpointer.files import FileStore
from dlrm_checkpointer.restore import newest_snapshot
from dlrm_checkpointer.retention import apply_retention, decide, is_orphan
from dlrm_checkpointer.walk import snapshot_digest

KEYS = st.sets(st.tuples(st.integers(1, 12), st.integers(1, 3)), max_size=15)


@settings(deadline=None)
@given(keys=KEYS, restored=st.integers(0, 12), keep_last=st.integers(1, 5))
def test_what_is_kept_is_the_newest_of_the_lineage_and_all_else_goes(keys, restored, keep_last):
    attempts = [Attempt(2, restored)]

    decision = decide(keys, attempts, keep_last)

    counted = sorted({step for step, attempt in keys if in_lineage(step, attempt, attempts)}, reverse=True)
    assert [step for step, _ in decision.keep] == counted[:keep_last]
    assert set(decision.keep) | set(decision.retire) == keys
    assert not set(decision.keep) & set(decision.retire)


def test_a_step_committed_twice_counts_once_and_the_newer_attempts_stays():
    decision = decide([(5, 1), (5, 2), (4, 1)], [Attempt(2, 5)], keep_last=2)

    assert decision.keep == ((5, 2), (4, 1))
    assert decision.retire == ((5, 1),)


def test_objects_that_may_still_become_a_snapshot_are_no_orphans():
    kept, attempts = [(100, 2), (150, 2)], [Attempt(2, 100)]

    assert not is_orphan((200, 2), [*kept], kept, attempts), "the newest attempt's next cut"
    assert not is_orphan((120, 2), [*kept], kept, attempts), "a slow pod of the newest attempt"
    assert not is_orphan((100, 2), [*kept], kept, attempts), "a kept snapshot"
    assert is_orphan((120, 1), [*kept], kept, attempts), "of a history that was given up"
    assert is_orphan((50, 1), [*kept], kept, attempts), "older than all that is kept"
    assert not is_orphan((1, 1), [], [], attempts), "nothing is committed yet"


def test_the_last_n_stay_and_their_state_is_untouched(tmp_path: Path, files: FileStore, new_model, new_pod):
    model, pod = new_model(), new_pod(tmp_path / "pod", files, keep_last=2)
    attempt = claim_attempt(files, None, "test")
    digests = {}
    for _ in range(5):
        pod.commit(model.train(), attempt)
        digests[model.step] = model.digest()

    steps = [each.step for each in list_snapshots(files)]

    assert steps == [5, 4]
    assert snapshot_digest(newest_snapshot(files)[0]) == digests[5]
    assert {key.split("/")[1] for key in (info.key for info in files.list("chunks/"))} == {f"{s:016d}" for s in steps}
    assert {key.split("/")[1] for key in (info.key for info in files.list("parts/"))} == {f"{s:016d}" for s in steps}


def test_only_the_newest_attempt_removes_anything(tmp_path: Path, files: FileStore, new_model, new_pod):
    model, pod = new_model(), new_pod(tmp_path / "pod", files)
    attempt = claim_attempt(files, None, "old")
    for _ in range(3):
        pod.commit(model.train(), attempt)
    claim_attempt(files, 3, "new")

    removed = apply_retention(files, attempt, keep_last=1)

    assert removed == 0
    assert [each.step for each in list_snapshots(files)] == [3, 2, 1]


def test_what_a_live_writer_is_uploading_stays_and_what_a_lost_one_left_goes(
    tmp_path: Path, files: FileStore, new_model, new_pod
):
    model, pod = new_model(), new_pod(tmp_path / "pod", files)
    lost = claim_attempt(files, None, "lost")
    attempt = claim_attempt(files, None, "live")
    pod.commit(model.train(2), attempt)
    abandoned = f"chunks/{9:016d}/{lost:08d}/000000/000000-aa.safetensors"
    uploading = f"chunks/{9:016d}/{attempt:08d}/000000/000000-aa.safetensors"
    files.put(abandoned, b"x")
    files.put(uploading, b"x")

    apply_retention(files, attempt, keep_last=1)

    assert files.size(uploading) == 1
    assert files.size(abandoned) is None
