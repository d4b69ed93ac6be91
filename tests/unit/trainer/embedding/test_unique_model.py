"""Random histories of unique tables: the model of training against a replay of its batches."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlrm_testing.trainer.unique_tables import ModelTrainer, Replay, Shape, Snapshot, Store, fold, merge


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


shapes = st.builds(
    Shape, buckets=st.just(6), quota=st.integers(1, 12), width=st.just(20), period=st.sampled_from([None, 1, 2, 3, 7])
)
key = st.builds(lambda hot, number: number % 30 if hot else number, st.booleans(), st.integers(0, 119))
batch_lists = st.lists(st.lists(key, max_size=20), min_size=8, max_size=16)
events = st.builds(
    Event,
    cut=st.booleans(),
    with_parent=st.integers(0, 3).map(bool),
    copied=st.integers(0, 6),
    commits=st.booleans(),
    evaluates=st.booleans(),
    is_killed=st.integers(0, 7).map(lambda number: number == 0),
    world_size=st.integers(1, 4),
    lookahead=st.integers(0, 3),
)


class History:
    """A job whose trainers are killed, and whose cuts are committed late or lost."""

    def __init__(self, shape: Shape, batches: list[list[int]]) -> None:
        self.shape, self.batches, self.store = shape, batches, Store()
        replay = Replay(shape)
        self.rows, self.periods = [dict(replay.rows)], [replay.period.copy()]
        for batch in batches:
            replay.train(batch)
            self.rows.append(dict(replay.rows))
            self.periods.append(replay.period.copy())
        self.trainer = ModelTrainer(shape, 1, 0)
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
            self.trainer = ModelTrainer(self.shape, event.world_size, event.lookahead, self.store, step)
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
@given(shapes, batch_lists, st.lists(events, max_size=40))
@settings(max_examples=500)
def test_rows_are_those_of_a_replay(shape: Shape, batches: list[list[int]], happening: list[Event]) -> None:
    History(shape, batches).run(happening)
