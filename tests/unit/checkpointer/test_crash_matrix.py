"""A sidecar that dies at any call of the store and at any change of the hand-off folder, and any one object damaged."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dlrm_api.errors import SnapshotError, StoreUnavailableError
from dlrm_api.names import ExitCode
from dlrm_checkpointer.format.attempts import ATTEMPTS, claim_attempt
from dlrm_checkpointer.format.chain import load_chain
from dlrm_checkpointer.format.manifest import PARTS, manifest_key
from dlrm_checkpointer.read.restore import Snapshot, newest_snapshot, open_snapshot, snapshot_keys
from dlrm_checkpointer.types import SnapshotName
from dlrm_checkpointer.write.retention import Retention, RetentionPolicy
from dlrm_testing.checkpointer.steps import Steps
from dlrm_testing.checkpointer.truth import flipped
from dlrm_testing.checkpointer.turns import FailingStore, Killed, MemoryStore
from dlrm_testing.digests import snapshot_digest
from dlrm_testing.repeats import repeats, spaced

POLICIES = ["full", "one-shot", "consecutive", "intermittent"]
STEPS = Steps()
COMMITTED = 3
"""Snapshots before the cut at which things go wrong."""
FLIPPED_BITS = repeats(3, soak=64)
"""Bits of each object that are flipped, one at a time."""


@dataclass
class Scene:
    """A store with snapshots, and a pod whose two ranks have handed over one more cut."""

    objects: dict[str, tuple[bytes, float]]
    folder: Path
    digests: dict[int, str]
    """Digest of the state at each step."""


@pytest.fixture(params=POLICIES)
def policy(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def scene(tmp_path: Path, clock, new_model, new_pod, few_rows, policy, monkeypatch) -> Scene:
    monkeypatch.setattr("dlrm_checkpointer.format.chunk.CHUNK_BYTES", 300)
    store, model = MemoryStore(clock), new_model(few_rows)
    pod = new_pod(
        tmp_path / "pod", store, world_size=2, ranks=range(2), policy=policy, keep_last=COMMITTED, max_chain=2
    )
    attempt, digests = claim_attempt(store, None, "test"), {}
    for _ in range(COMMITTED):
        pod.commit(model.train(), attempt)
        digests[model.step] = model.digest()
    pod.cut(model.train(), attempt)
    digests[model.step] = model.digest()
    pod.end()
    return Scene(dict(store.objects), pod.folder, digests)


@dataclass
class Take:
    """The scene once more, to go wrong in another way."""

    scene: Scene
    store: MemoryStore
    failing: FailingStore
    pod: Any

    def sidecar_dies(self) -> None:
        with contextlib.suppress(Killed):
            self.pod.finish()

    def is_right(self, *, done: bool) -> None:
        """The old snapshot or the new one is found, and whatever retention keeps is whole."""
        snapshot, reasons = newest_snapshot(self.store)
        assert reasons == []
        assert snapshot.step in ([COMMITTED + 1] if done else [COMMITTED, COMMITTED + 1])
        assert snapshot_digest(snapshot) == self.scene.digests[snapshot.step]
        for name in Retention(self.store, RetentionPolicy(keep_last=1)).decide().keep:
            open_snapshot(self.store, name.step, name.attempt)

    def goes_on(self) -> None:
        """A new sidecar on the same folder does the rest."""
        self.failing.before = lambda number: None
        self.pod.store = self.store
        code = self.pod.finish()
        self.is_right(done=True)
        assert code == ExitCode.DONE, self.pod.status.progress
        assert [path.name for path in self.pod.folder.iterdir() if path.is_dir()] == []
        assert list(self.pod.folder.glob("uploaded-*")) == []


@pytest.fixture
def takes(scene: Scene, tmp_path: Path, clock, new_pod, policy) -> Iterator[Take]:
    """Endlessly many."""

    def make() -> Iterator[Take]:
        number = 0
        while True:
            number += 1
            folder = tmp_path / f"take-{number}"
            shutil.copytree(scene.folder, folder)
            store = MemoryStore(clock)
            store.objects = dict(scene.objects)
            failing = FailingStore(store)
            pod = new_pod(
                folder, failing, world_size=2, ranks=range(2), policy=policy, keep_last=1, max_chain=2, grace_s=60
            )
            pod.end()
            yield Take(scene, store, failing, pod)
            shutil.rmtree(folder)

    return make()


def dies_before(take: Take, call: int) -> None:
    def before(number: int) -> None:
        if number >= call:
            raise Killed

    take.failing.before = before


def dies_after(take: Take, call: int) -> None:
    def after(number: int) -> None:
        if number >= call:
            raise Killed

    dies_before(take, call + 1)
    take.failing.after = after


def gets_no_answer(take: Take, call: int) -> None:
    def after(number: int) -> None:
        if number == call:
            raise StoreUnavailableError("the answer was lost")

    take.failing.after = after


FAILURES = [dies_before, dies_after, gets_no_answer]


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize("how", FAILURES)
def test_whichever_call_of_the_store_is_the_last_a_new_sidecar_finishes(takes: Iterator[Take], how):
    undisturbed = next(takes)
    undisturbed.sidecar_dies()  # it does not: nothing is in its way
    undisturbed.is_right(done=True)
    calls = undisturbed.failing.calls

    # In CI each call fails in one of the three ways.
    for call in spaced(calls, ci=3, soak=1, start=FAILURES.index(how)):
        take = next(takes)
        how(take, call)
        take.sidecar_dies()
        take.is_right(done=False)
        take.goes_on()

    assert calls > 40


@pytest.mark.slow
def test_a_new_sidecar_finishes_after_a_crash_at_any_change(takes: Iterator[Take]):
    undisturbed = next(takes)
    with STEPS.watching(undisturbed.pod.folder):
        undisturbed.sidecar_dies()
    changes = STEPS.done
    undisturbed.is_right(done=True)

    for change in range(changes):
        take = next(takes)
        with STEPS.watching(take.pod.folder, change):
            take.sidecar_dies()
        take.is_right(done=False)
        take.goes_on()

    assert changes > 10


@pytest.mark.slow
def test_a_rank_that_dies_at_any_change_leaves_a_whole_cut_or_none(takes: Iterator[Take], new_model, few_rows):
    def cut(take: Take, die_at: int | None) -> None:
        """The next cut, after the one that waits, of ranks that die."""
        take.pod.finish()
        take.pod.open()
        with STEPS.watching(take.pod.folder, die_at), contextlib.suppress(Killed):
            take.pod.cut(model, 1)
        if die_at is not None:
            take.pod.writers = {}

    model = new_model(few_rows).train(COMMITTED + 2)
    undisturbed = next(takes)
    cut(undisturbed, None)
    changes = STEPS.done
    undisturbed.pod.end()

    for change in range(changes):
        take = next(takes)
        cut(take, change)
        take.pod.end()
        code = take.pod.finish()
        snapshot, reasons = newest_snapshot(take.store)
        assert (code, reasons) == (ExitCode.DONE, [])
        wanted = {COMMITTED + 1: take.scene.digests[COMMITTED + 1], model.step: model.digest()}
        assert snapshot_digest(snapshot) == wanted[snapshot.step]
        assert [path.name for path in take.pod.folder.iterdir() if path.is_dir()] == []

    assert changes > 10


def objects_of(store: MemoryStore, step: int) -> set[str]:
    """All that reading a snapshot needs."""
    chain = load_chain(store, SnapshotName(step, 1))
    manifests = {manifest_key(each.step, each.attempt) for each in chain.links}
    return manifests | {entry.key for entry in Snapshot(store, chain).objects}


@pytest.mark.slow
@pytest.mark.soak
def test_damage_to_any_object_never_restores_a_mixture(takes: Iterator[Take]):
    whole = next(takes)
    whole.pod.keep_last = 100
    whole.goes_on()
    store = whole.store
    pristine = dict(store.objects)
    needs = {step: objects_of(store, step) for step, _ in snapshot_keys(store)}
    others = sorted(pristine)

    for place, (key, (body, time)) in enumerate(sorted(pristine.items())):
        bits = [8 * len(body) * part // FLIPPED_BITS + part for part in range(FLIPPED_BITS)] if body else []
        damages = [None, b"", body[:-1], body[: len(body) // 2], body + b"x", pristine[others[place - 1]][0]]
        for damaged in (*damages, *(flipped(body, bit) for bit in bits)):
            store.objects = dict(pristine)
            if damaged is None:
                del store.objects[key]
            else:
                store.objects[key] = damaged, time
            usable = [step for step, keys in needs.items() if key not in keys]
            try:
                snapshot, _ = newest_snapshot(store)
            except SnapshotError:
                assert not usable or key.startswith(ATTEMPTS), key
                continue
            if snapshot is None:
                assert not usable, key
                continue
            assert snapshot_digest(snapshot) == whole.scene.digests[snapshot.step], key
            assert snapshot.step == max(usable), key
    assert any(key.startswith(PARTS) for key in pristine)
