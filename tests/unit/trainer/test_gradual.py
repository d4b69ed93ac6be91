"""Cuts above the hand-off budget: segments handed over during training hold the state at the cut's step."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from dlrm_api.job import DLRMJob
from dlrm_api.plan import Plan
from dlrm_checkpointer.handoff.cut import Cut, CutWithdrawnError
from dlrm_checkpointer.handoff.inbox import Inbox
from dlrm_checkpointer.handoff.protocol import Durable, ReadyCut, SegmentName
from dlrm_checkpointer.handoff.writer import HandoffWriter
from dlrm_checkpointer.types import CutMeta, ShardRows
from dlrm_testing.trainer.cutting import TIERS, check_cut, job_of, learner_of, rows_of_batch, state_of
from dlrm_testing.trainer.shardings import random_plan
from dlrm_trainer.checkpointing.restore import live_digest, model_document
from dlrm_trainer.data import open_reader
from dlrm_trainer.distributed.collectives import Collectives
from dlrm_trainer.embedding import CopyBeforeUpdate
from dlrm_trainer.embedding.changes import MAX_KEPT
from dlrm_trainer.train import prepared_ahead

ALONE = Collectives(0, 1, lambda: "")
NO_SHRINKING = (Phase.explicit, Phase.reuse, Phase.generate)  # a run takes a second: shrinking would take minutes
QUIET = [HealthCheck.function_scoped_fixture]
STEPS = 14


@dataclass
class Taker:
    """A checkpointer that keeps all segments, and frees space now and then."""

    inbox: Inbox
    draw: np.random.Generator
    pace: float
    pieces: dict[int, list[ShardRows]] = field(default_factory=dict)
    whole: dict[int, int] = field(default_factory=dict)
    """Slices of each whole cut."""

    def turn(self) -> None:
        """Take what waits, or leave it."""
        self.inbox.sweep()
        for name in self.inbox.ready():
            if self.draw.random() > self.pace:
                return
            cut = self.inbox.open(name)
            self._keep(cut)
            if isinstance(name, SegmentName):
                self.inbox.write_durable(name, Durable(slices=cut.number + 1))
            else:
                assert self.inbox.read_durable(cut).slices == cut.number
                self.whole[name.step] = cut.number + 1
                self.inbox.free(name)
            self.inbox.sweep()

    def _keep(self, cut: ReadyCut) -> None:
        kept = self.pieces.setdefault(cut.meta.step, [])
        if cut.number == 0:
            kept.clear()
        for piece in cut.pieces():
            arrays = {name: getattr(piece, name).copy() for name in ("row_ids", "rows", "state")}
            kept.append(ShardRows(shard=piece.shard, **arrays))


@dataclass
class Report:
    """The cuts of a run and their outcome."""

    whole: dict[int, int]
    given_up: list[int]
    digest: str


def train(
    job: DLRMJob,
    plan: Plan,
    folder: Path,
    seed: int,
    budget: int | None,
    pace: float,
    *,
    commits: bool = True,
    idle: int = 0,
    threads: bool = True,
) -> Report:
    """Train with a cut after each step that may make one, and check each whole cut against the state at its step."""
    learner, draw = learner_of(ALONE, job, plan, folder), np.random.default_rng(seed)
    embeddings, reader = learner.embeddings, open_reader(job.spec, "train", 0, 1)
    writer = HandoffWriter(Path(tempfile.mkdtemp(dir=folder)), 0, budget)
    taker = Taker(Inbox(writer.folder, range(1)), draw, pace)
    looked_up: list[dict[str, set[int]]] = []
    states, parents = [state_of(embeddings.saved)], {}
    cut: Cut | None = None
    copying: CopyBeforeUpdate | None = None
    parent, given_up = 0, []
    owned = [part.shard for part in embeddings.saved]
    batches = (reader.read(number) for number in range(STEPS))
    for prepared in prepared_ahead(batches, learner.send, learner.prepare, depth=plan.lookahead, sent_ahead=0):
        learner.apply(learner.compute(prepared, 64), factor=1.0)
        looked_up.append(rows_of_batch(job, prepared.batch))
        step = len(looked_up)
        embeddings.settle()
        states.append(state_of(embeddings.saved))
        if budget is not None and cut is None and writer.ready():
            parent = max([parent, *taker.whole]) if commits else 0
            parents[step] = parent
            embeddings.saved.begin_cut(step, parent or None)
            meta = CutMeta(step=step, samples=0, world_size=1, attempt=1, model=model_document(job.spec, learner))
            cut = writer.reserve(meta, None, owned=owned, size=embeddings.saved.cut_size())
            copying = embeddings.saved.begin_copying(cut)
            copying.copy(int(draw.integers(0, 20_000)))
            if threads and not copying.done:
                copying.start()
        if cut is not None and copying is not None:
            try:
                over = copying.copy(int(draw.integers(0, 20_000))) and cut.finish() is not None
            except CutWithdrawnError:
                given_up.append(cut.name.step)
                over = True
            if over:
                embeddings.saved.end_copying()
                copying.close()
                cut = copying = None
        if step > idle:
            taker.turn()
        for done in sorted(taker.whole.keys() & taker.pieces.keys()):
            before = parents[done]
            exact = done - before <= MAX_KEPT
            check_cut(taker.pieces.pop(done), states[before], states[done], looked_up[:done], before, exact=exact)
    if cut is not None and copying is not None:
        embeddings.saved.end_copying()
        copying.close()
        cut.withdraw()
        given_up.append(cut.name.step)
    taker.inbox.sweep()
    assert not list(writer.folder.glob("writing-*"))
    digest = live_digest(learner, ALONE)
    embeddings.close()
    taker.inbox.close()
    writer.close("done")
    return Report(taker.whole, given_up, digest)


@pytest.mark.slow
@settings(max_examples=12, phases=NO_SHRINKING, suppress_health_check=QUIET)
@given(
    seed=st.integers(0, 10_000),
    tiers=st.sampled_from(TIERS),
    lookahead=st.integers(1, 3),
    budget=st.integers(40_000, 200_000),
    pace=st.sampled_from([0.5, 1.0]),
    threads=st.booleans(),
)
def test_segments_of_many_steps_hold_the_state_at_the_step_of_their_cut(
    tmp_path: Path, seed: int, tiers: tuple[str, ...], lookahead: int, budget: int, pace: float, threads: bool
) -> None:
    job = job_of(tmp_path)
    plan = random_plan(np.random.default_rng(seed), job.spec.model, 1, tiers, lookahead if tiers else 0)  # type: ignore[arg-type]

    undisturbed = train(job, plan, tmp_path, seed, None, 1.0)
    cut = train(job, plan, tmp_path, seed, budget, pace, threads=threads)

    assert cut.digest == undisturbed.digest
    assert cut.whole or cut.given_up


@pytest.mark.slow
@pytest.mark.parametrize("tiers", TIERS[::2])
def test_a_cut_of_many_slices_is_handed_over_over_many_steps(tmp_path: Path, tiers: tuple[str, ...]) -> None:
    job = job_of(tmp_path)
    plan = random_plan(np.random.default_rng(3), job.spec.model, 1, tiers, 2 if tiers else 0)  # type: ignore[arg-type]

    report = train(job, plan, tmp_path, 3, 60_000, 1.0, commits=False, threads=False)

    assert max(report.whole.values()) > 3


def test_rows_of_a_withdrawn_cut_are_in_the_next_one(tmp_path: Path) -> None:
    job = job_of(tmp_path)
    plan = random_plan(np.random.default_rng(3), job.spec.model, 1)

    report = train(job, plan, tmp_path, 3, 48_000, 1.0, idle=6, threads=False)

    assert min(report.given_up) <= 6 < min(report.whole)
