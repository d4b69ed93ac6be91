"""A job's life in turns: its gangs and their sidecars, what goes wrong, and what must be true whatever does."""

from __future__ import annotations

import json
import random
import threading
from pathlib import Path
from typing import Any

import numpy as np

from dlrm_api.errors import InvalidSpecError, SnapshotError, TemporaryError
from dlrm_checkpointer.format.attempts import claim_attempt, read_attempts
from dlrm_checkpointer.handoff.cut import CutWithdrawnError
from dlrm_checkpointer.handoff.protocol import HandoffDir
from dlrm_checkpointer.read.restore import Snapshot, newest_snapshot, open_snapshot
from dlrm_checkpointer.types import SnapshotName
from dlrm_checkpointer.write.retention import ORPHAN_S, RetentionPolicy
from dlrm_testing.checkpointer.truth import Handed, Truth
from dlrm_testing.checkpointer.turns import Actor, Clock, FailingStore, MemoryStore

MAX_TURNS = 40_000
CLAIMS = 12
"""Tries of one attempt to begin; the store fails only the first ones."""


class Gang:
    """Run the trainers and sidecars of an attempt."""

    def __init__(self, attempt: int, model: Any, pods: list[Any]) -> None:
        self.attempt, self.model, self.pods = attempt, model, pods
        self.directories = [HandoffDir(pod.folder) for pod in pods]
        self.stops = [threading.Event() for _ in pods]
        self.sidecars = [self._sidecar(number) for number in range(len(pods))]
        self.trains = True

    def _sidecar(self, number: int) -> Actor:
        pod, stop = self.pods[number], self.stops[number]

        def work() -> Any:
            inbox, sidecar = pod.sidecar()
            try:
                return sidecar.run(stop)
            finally:
                inbox.close()

        return Actor(work)

    def kill_sidecar(self, number: int) -> None:
        """Kill it, and start another one."""
        self.sidecars[number].kill()
        self.sidecars[number] = self._sidecar(number)

    def end(self) -> None:
        """End the trainers."""
        self.trains = False
        for pod, stop in zip(self.pods, self.stops, strict=True):
            pod.end("ended")
            stop.set()

    def vanish(self) -> None:
        """Its nodes are lost, folders and all."""
        self.end()
        for sidecar in self.sidecars:
            sidecar.kill()


class ShutdownPolicy:
    """One job under one seed.

    Args:
        seed: all that is random.
        folder: of the hand-off folders.
        clock: stands in for the time.
        new_model: makes the model.
        new_pod: makes a pod.
        tables: of the model.
    """

    def __init__(self, seed: int, folder: Path, clock: Clock, new_model: Any, new_pod: Any, tables: Any) -> None:
        self.draw = random.Random(seed)
        self.folder, self.clock = folder, clock
        self.new_model, self.new_pod, self.tables = new_model, new_pod, tables
        self.store = MemoryStore(clock, conditional=self.draw.random() < 0.85)
        self.failing = FailingStore(self.store, self.draw)
        self.keep_last = self.draw.choice([1, 1, 2, 3])
        self.bits = self.draw.choice([2, 3, 4, 8, 16, 32, 32, "auto"])
        self.policy = self.draw.choice(["full", "one-shot", "consecutive", "consecutive", "intermittent"])
        self.max_chain = self.draw.choice([1, 3, 24])
        self.keep_every_s = self.draw.choice([None, None, 5_000.0])
        self.gangs: list[Gang] = []
        self.orphan_s = ORPHAN_S if seed % 2 else 60.0
        rule = RetentionPolicy(keep_last=self.keep_last, keep_every_s=self.keep_every_s, orphan_s=self.orphan_s)
        self.truth = Truth(self.store, rule, new_model, tables)
        self.made = 0

    def run(self) -> None:
        """Several attempts, each check at its start, then a quiet one that must commit."""
        for _ in range(self.draw.randint(1, 4)):
            self.failing.share = self.draw.choice([0.0, 0.0, 0.02, 0.1])
            if self._attempt() is None:
                return
            if self.draw.random() < 0.15:
                self.truth.damage(self.draw)
        self.failing.share = 0.0
        self._settle()
        self.truth.check()
        if self.draw.random() < 0.2:
            self.truth.damage(self.draw)
            self.truth.check()
        gang = self.start()
        if gang is None:
            return
        self._train(gang)
        name = self.cut(gang)
        self._finish(gang)
        self.truth.check()
        assert name in self.truth.acknowledged or self.truth.damaged, f"{name} was not committed"

    def _attempt(self) -> Gang | None:
        gang = self.start()
        if gang is None:
            return None
        for _ in range(self.draw.randint(0, 6)):
            if not gang.trains:
                break
            each = self.draw.choice([gang, gang, gang, *(other for other in self.gangs if other.trains)])
            self._train(each)
            if self.draw.random() < 0.8:
                self.cut(each)
            self.go_on(self.draw.choice([0, 3, 10, 40]))
            if self.draw.random() < 0.1:
                self.clock.now += 7_200
        how = self.draw.choice(["finishes", "lingers", "goes on", "vanishes"])
        if how == "finishes":
            self._finish(gang)
        elif how == "vanishes":
            gang.vanish()
            self.gangs.remove(gang)
        elif how == "lingers":
            gang.end()
        return gang

    def start(self) -> Gang | None:
        """Start a new attempt from the newest snapshot; None if that is refused, and rightly."""
        share = self.failing.share
        for number in range(CLAIMS):
            self.failing.share = share if number < CLAIMS // 2 else 0
            least = self.truth.usable()
            chosen: list[SnapshotName | None] = []

            def claim(chosen: list[SnapshotName | None] = chosen) -> tuple[Snapshot | None, int]:
                snapshot, _ = newest_snapshot(self.failing)
                chosen.append(snapshot and snapshot.name)
                return snapshot, claim_attempt(self.failing, snapshot and snapshot.step, "test")

            actor = self.until_ended(Actor(claim))
            self.truth.note_attempts(chosen[0] if chosen else None)
            if self.truth.damaged:  # what was whole may be retired by now
                least &= self.truth.usable()
            if actor.error is None:
                break
            if isinstance(actor.error, SnapshotError) and self.truth.damaged and not least:
                return None
            if not isinstance(actor.error, TemporaryError):
                raise actor.error
            self.clock.now += 120  # a gang is not started again at once
        else:
            raise AssertionError(f"no attempt could be claimed: {actor.error!r}")
        self.failing.share = share
        snapshot, attempt = actor.result
        assert snapshot is not None or not least, f"{max(least)} was forgotten"
        if snapshot:
            assert snapshot.name in self.truth.lineage(attempt), f"{snapshot.name} is of no history that counts"
            assert not least or snapshot.name >= max(least), f"{max(least)} was forgotten for {snapshot.name}"
        return self._gang(attempt, snapshot)

    def _gang(self, attempt: int, snapshot: Snapshot | None) -> Gang:
        model = self.new_model(self.tables)
        if snapshot:
            found = self.until_ended(Actor(lambda: open_snapshot(self.store, snapshot.step, snapshot.attempt)))
            if found.error:
                raise found.error
            state = self.truth.state(snapshot.name)
            self.truth.compare(found.result, state)
            model.rows = {name: rows.copy() for name, rows in state.rows.items()}
            model.state = {name: values.copy() for name, values in state.state.items()}
            model.dense = {name: array.copy() for name, array in state.dense.items()}
            model.step = snapshot.step
        world, pods = self.draw.choice([(1, 1), (2, 1), (2, 2), (3, 1), (4, 2)])
        each = world // pods
        self.made += 1
        made = [
            self.new_pod(
                self.folder / f"{self.made}-{number}",
                self.failing,
                world_size=world,
                ranks=range(number * each, (number + 1) * each),
                bits=self.bits,
                keep_last=self.keep_last,
                policy=self.policy,
                max_chain=self.max_chain,
                keep_every_s=self.keep_every_s,
                grace_s=20.0,
                orphan_s=self.orphan_s,
                budget_bytes=self.draw.choice([None, None, 12_000 * each]),
            )
            for number in range(pods)
        ]
        for pod in made:
            for writer in pod.writers.values():
                writer.restored(snapshot and snapshot.name)
        gang = Gang(attempt, model, made)
        self.gangs.append(gang)
        return gang

    def _train(self, gang: Gang) -> None:
        model, draw = gang.model, np.random.default_rng(self.draw.getrandbits(32))
        model.step += self.draw.randint(1, 3)
        for table in model.tables:
            ids = np.unique(draw.integers(0, table.rows, int(draw.integers(0, table.rows // 2 + 2))))
            rows = model.rows[table.name][ids] + draw.normal(0, 0.1, (len(ids), table.dim)).astype(np.float32)
            model.rows[table.name][ids] = rows.astype(np.float16) if table.dtype == "fp16" else rows
            model.state[table.name][ids] += draw.random((len(ids), table.state_width), np.float32)
            model.touched_at[table.name][ids] = model.step
        model.dense["top.0.weight"] = model.dense["top.0.weight"] + draw.normal(0, 0.1, (3, 5)).astype(np.float32)
        model.dense["opt.step"] = np.asarray(model.step, np.int64)

    def cut(self, gang: Gang) -> SnapshotName | None:
        """Hand over a cut, unless an earlier one waits for long; what was handed over, perhaps of some ranks alone."""
        writers = {rank: (pod, writer) for pod in gang.pods for rank, writer in pod.writers.items()}
        name = SnapshotName(gang.model.step, gang.attempt)
        for _ in range(100):
            try:
                if all(writer.ready() for _, writer in writers.values()):
                    break
            except InvalidSpecError:
                self._superseded(gang)
                return None
            self.go_on(5)
        else:
            return None
        dies = self.draw.random() < 0.05 and self.failing.share > 0

        def work() -> None:
            parent = writers[0][1].begin(gang.attempt)
            model, world = gang.model, len(writers)
            pieces = [piece for rank in writers for piece in model.pieces(rank, world, parent)]
            copies = [piece.part(0, len(piece.row_ids)) for piece in pieces]
            self.truth.handed[name] = Handed(parent, copies, {key: array.copy() for key, array in model.dense.items()})
            for rank, (pod, _) in writers.items():
                Actor.pause()
                if dies and rank == len(writers) - 1:
                    return
                pod.cut_of(rank, model, gang.attempt, timeout_s=60, parent=parent)

        actor = self.until_ended(Actor(work))
        if dies:
            gang.end()
        if isinstance(actor.error, InvalidSpecError):
            self._superseded(gang)
        elif actor.error and not isinstance(actor.error, CutWithdrawnError):
            raise actor.error
        return name

    def _superseded(self, gang: Gang) -> None:
        """Trainers that are told of a newer attempt end; one must have been claimed."""
        assert read_attempts(self.store, gang.attempt)
        gang.end()

    def _finish(self, gang: Gang) -> None:
        gang.end()
        for sidecar in gang.sidecars:
            self.until_ended(sidecar)
        self._hear(gang)
        self.gangs.remove(gang)

    def _settle(self) -> None:
        for gang in list(self.gangs):
            self._finish(gang)

    def until_ended(self, actor: Actor) -> Actor:
        """Let it and all others run until it ends."""
        for _ in range(MAX_TURNS):
            if actor.ended:
                return actor
            actor.step()
            if self.draw.random() < 0.5:
                self.go_on(1)
        raise AssertionError("it does not end")

    def go_on(self, turns: int) -> None:
        """Let sidecars run, die and cut."""
        for _ in range(turns):
            every = [(gang, number) for gang in self.gangs for number in range(len(gang.sidecars))]
            if not every:
                return
            gang, number = self.draw.choice(every)
            if self.failing.share and self.draw.random() < 0.01:
                gang.kill_sidecar(number)
            sidecar = gang.sidecars[number]
            for _ in range(self.draw.choice([1, 1, 5, 20])):
                sidecar.step()
                if sidecar.asleep:
                    break
            if sidecar.error:
                raise sidecar.error
            self._hear(gang)

    def _hear(self, gang: Gang) -> None:
        for directory in gang.directories:
            known = directory.committed.read()
            if known:
                self.truth.acknowledged.add(known)

    def __str__(self) -> str:
        said = {
            "policy": self.policy,
            "bits": self.bits,
            "keepLast": self.keep_last,
            "damaged": sorted(self.truth.damaged),
        }
        return json.dumps(said)
