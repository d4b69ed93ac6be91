"""Random histories of unique tables: the model of training against a replay of its batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlrm_testing.repeats import repeats
from dlrm_testing.trainer.unique_parts import TrainedPart
from dlrm_testing.trainer.unique_tables import ModelPart, ModelTrainer, Replay, Shape, Snapshot, Store, fold, merge

Part = Callable[[Shape, range], ModelPart]


@dataclass(frozen=True)
class Event:
    """What happens between two steps."""

    cut: bool
    with_parent: bool
    copied: int
    commits: bool
    evaluates: bool
    is_killed: bool
    world_size: int
    lookahead: int

    @classmethod
    def of(cls, bits: int) -> Event:
        return cls(
            cut=bool(bits & 1),
            with_parent=bits & 6 != 0,
            commits=bool(bits & 8),
            evaluates=bool(bits & 16),
            is_killed=bits & 0xE0 == 0,
            world_size=1 + (bits >> 8 & 3),
            lookahead=(bits >> 10 & 3) % 3,
            copied=bits >> 12 and 5,
        )


shapes = st.builds(
    Shape, buckets=st.just(4), quota=st.integers(1, 6), width=st.just(10), period=st.sampled_from([None, 1, 2, 3, 7])
)
# Few draws of much data each: hypothesis takes longer to draw than the model to run.
batch_lists = st.lists(
    st.binary(max_size=16).map(lambda drawn: [key_of(byte) for byte in drawn]), min_size=8, max_size=16
)
events = st.lists(st.integers(0, 2**13 - 1).map(Event.of), min_size=8, max_size=40)


def key_of(byte: int) -> int:
    """Half of all lookups are of few keys."""
    return byte % 12 if byte & 128 else byte % 40


class History:
    """A job whose trainers are killed, and whose cuts are committed late or lost."""

    def __init__(self, shape: Shape, batches: list[list[int]], lookahead: int, part: Part = ModelPart) -> None:
        self.part = part
        self.shape, self.batches, self.store = shape, batches, Store()
        replay = Replay(shape)
        self.rows, self.periods = [dict(replay.rows)], [replay.period.copy()]
        for batch in batches:
            replay.train(batch)
            self.rows.append(dict(replay.rows))
            self.periods.append(replay.period.copy())
        self.trainer = ModelTrainer(shape, 1, lookahead, part=part)
        self.waiting: list[tuple[int, Snapshot]] = []
        """Cuts that are handed over and not committed."""

    def run(self, events: list[Event]) -> None:
        for event in events:
            if self.trainer.step < len(self.batches):
                self.trainer.train(self.batches)
            self.check()
            self.happen(event)
        while self.trainer.step < len(self.batches):
            self.trainer.train(self.batches)
            self.check()

    def happen(self, event: Event) -> None:
        if event.evaluates:
            rows = self.rows[self.trainer.step]
            keys = range(self.shape.buckets * self.shape.width)
            assert self.trainer.read(keys) == {key: rows[key].value if key in rows else None for key in keys}
        self.trainer.copy(event.copied)
        if event.commits:
            if finished := self.trainer.finish_cut():
                self.waiting.append(finished)
            self.commit()
        # The trainer's cut may be dropped by the next one: it is lost.
        if event.cut and self.trainer.step not in self.store:
            self.trainer.begin_cut(max(self.store, default=None) if event.with_parent else None)
        if event.is_killed:
            self.waiting.clear()
            step = max(self.store, default=0)
            self.trainer = ModelTrainer(self.shape, event.world_size, event.lookahead, self.store, step, self.part)
            self.check()

    def commit(self) -> None:
        for step, snapshot in self.waiting:
            self.store[step] = snapshot
            assert merge(self.store, step) == self.rows[step]
            if snapshot.parent is not None:
                folded = fold(snapshot, self.store[snapshot.parent])
                assert merge(self.store | {step: folded}, step) == self.rows[step]
        self.waiting.clear()

    def check(self) -> None:
        assert self.trainer.state() == self.rows[self.trainer.step]
        assert self.trainer.period == self.periods[self.trainer.step]


@pytest.mark.slow
@given(shapes, batch_lists, st.integers(0, 2), events)
@settings(max_examples=100)
def test_rows_of_the_model_are_those_of_a_replay(
    shape: Shape, batches: list[list[int]], lookahead: int, happening: list[Event]
) -> None:
    History(shape, batches, lookahead).run(happening)


@pytest.mark.slow
@pytest.mark.soak
@given(shapes, batch_lists, st.integers(0, 2), events)
@settings(max_examples=repeats(150, soak=3_000))
def test_rows_of_the_trainer_are_those_of_a_replay(
    shape: Shape, batches: list[list[int]], lookahead: int, happening: list[Event]
) -> None:
    History(shape, batches, lookahead, TrainedPart).run(happening)
