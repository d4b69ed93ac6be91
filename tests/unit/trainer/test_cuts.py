from __future__ import annotations

import threading
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from dlrm_api.checkpoint import CheckpointSpec
from dlrm_checkpointer.handoff.writer import HandoffWriter
from dlrm_testing.trainer.gangs import run_ranks, small_job
from dlrm_trainer.checkpointing.control import EXPECTED_COMMIT_S, Agreement, CutControl, StoppedError
from dlrm_trainer.distributed.collectives import Collectives
from dlrm_trainer.embedding import ChangedBytes


@dataclass
class Writer:
    """A hand-off that is ready when a test says so."""

    is_ready: bool = True
    share: int | None = None
    committed: int | None = None
    asked: int = field(default=0)

    def ready(self) -> bool:
        self.asked += 1
        return self.is_ready

    def committed_step(self) -> int | None:
        return self.committed


def control_of(writer: Writer | None, **spec: object) -> CutControl:
    checkpoint = CheckpointSpec.model_validate({"uri": "file:///nowhere"} | spec)
    control = CutControl(checkpoint, Collectives(0, 1, lambda: ""))
    control.attach(writer)  # type: ignore[arg-type]
    return control


def agree(control: CutControl, loss: float, step: int) -> Agreement:
    return control.agreed(loss, control.votes(step))


def test_a_cut_is_due_every_so_many_steps() -> None:
    control = control_of(Writer(), intervalSteps=3)

    steps = []
    for step in range(1, 10):
        if agree(control, 0.5, step).cut:
            control.begun(step)
            control.made(step)
            steps.append(step)

    assert steps == [3, 6, 9]


def test_a_cut_is_due_when_the_interval_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    control = control_of(Writer(), interval="60s")

    early = agree(control, 0.5, 1)
    clock[0] += 61
    late = agree(control, 0.5, 2)

    assert (early.cut, late.cut) == (False, True)


def test_a_cut_waits_while_an_earlier_one_does_and_is_counted_once() -> None:
    writer = Writer(is_ready=False)
    control = control_of(writer, intervalSteps=2)

    waiting = [agree(control, 0.5, step) for step in (2, 3, 4)]
    writer.is_ready = True
    made = agree(control, 0.5, 5)

    assert not any(each.cut for each in waiting)
    assert made.cut
    assert control.delays == 1


def test_a_withdrawn_cut_is_counted_and_repeated_when_the_next_is_due() -> None:
    control = control_of(Writer(), intervalSteps=3)
    control.ask(1)

    asked = agree(control, 0.5, 2).cut
    control.begun(2)
    control.withdrawn()
    steps = []
    for step in (3, 4):
        if agree(control, 0.5, step).cut:
            control.begun(step)
            control.made(step)
            steps.append(step)

    assert asked
    assert steps == [3]
    assert control.abandoned_cuts == 1
    assert control.last_step == 3


@pytest.mark.parametrize("ends_well", [True, False])
def test_a_cut_asked_for_while_one_is_handed_over_comes_after_that_one(ends_well: bool) -> None:
    writer = Writer()
    control = control_of(writer, intervalSteps=100)
    assert agree(control, 0.5, 100).cut
    control.begun(100)
    writer.is_ready = False

    control.ask(119)
    meanwhile = agree(control, 0.5, 120)
    if ends_well:
        control.made(100)
    else:
        control.withdrawn()
    writer.is_ready = True
    next_ = agree(control, 0.5, 121).cut
    control.begun(121)

    assert (meanwhile.cut, control.delays) == (False, 1)
    assert next_
    assert not agree(control, 0.5, 122).cut


def test_a_request_during_the_hand_over_of_its_step_makes_no_second_cut() -> None:
    control = control_of(Writer(), intervalSteps=3)
    assert agree(control, 0.5, 3).cut
    control.begun(3)

    control.ask(3)
    control.made(3)

    assert control.wait_for(3, 0.0) == 3
    assert not agree(control, 0.5, 4).cut


def test_a_cut_comes_early_when_changed_rows_nearly_fill_the_budget() -> None:
    writer, kept = Writer(share=1_000), {4: 700}
    control = control_of(writer, intervalSteps=1_000)
    marked = [0]
    control.watch(lambda step: ChangedBytes(sum(kept[cut] for cut in kept if step is None or cut > step), marked[0]))

    seen = []
    for marked[0], committed in ((90, None), (200, 4), (799, 4), (100, None), (800, 4), (810, 4)):
        writer.committed = committed
        seen.append(agree(control, 0.5, 9).cut)

    assert seen == [False, False, False, True, True, True]
    assert control.early_cuts == 1


@pytest.mark.parametrize("is_handed_over", [True, False])
def test_a_cut_that_is_on_its_way_makes_none_early_unless_it_stays_away(
    monkeypatch: pytest.MonkeyPatch, is_handed_over: bool
) -> None:
    now = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    control = control_of(Writer(share=1_000), intervalSteps=1_000)
    control.watch(lambda step: ChangedBytes(700 if step is None or step < 5 else 0, 200))
    control.begun(5)
    if is_handed_over:
        control.made(5)

    soon = agree(control, 0.5, 10).cut
    now = EXPECTED_COMMIT_S
    late = agree(control, 0.5, 11).cut

    assert (soon, late) == (False, True)
    assert control.early_cuts == 1


def test_uncommitted_rows_that_fill_the_budget_make_no_cut_at_each_step() -> None:
    control = control_of(Writer(share=1_000), intervalSteps=1_000)
    control.watch(lambda step: ChangedBytes(800, 900))

    assert not agree(control, 0.5, 9).cut


def test_without_a_hand_off_no_cut_is_made_but_a_stop_is_heard() -> None:
    control = control_of(None, intervalSteps=1)
    control.ask(0)
    control.stop()

    agreed = agree(control, 0.25, 1)

    assert agreed == Agreement(loss=0.25, cut=False, stop=True, skipped=0, truncated=0)


def test_a_request_waits_for_the_cut_that_answers_it() -> None:
    control = control_of(Writer(), intervalSteps=1_000)
    answers: list[int | None] = []
    waiter = threading.Thread(target=lambda: answers.append(control.wait_for(7, 10.0)))
    waiter.start()

    control.made(5)
    control.made(8)
    waiter.join(10.0)

    assert answers == [8]
    assert control.wait_for(9, 0.0) is None


def test_a_stop_before_the_first_step_ends_the_wait_for_peers() -> None:
    control = control_of(Writer())
    control.check_stop()
    control.stop()

    with pytest.raises(StoppedError):
        control.check_stop()


def agree_on_rank(collectives: Collectives, folder: Path, asked_by: int, stopped_by: int) -> list[Agreement]:
    control = CutControl(small_job(folder).spec.checkpoint, collectives)
    control.attach(HandoffWriter(folder / "handoff", collectives.rank, None))
    agreements = []
    for step in range(1, 5):
        if step == 2 and collectives.rank == asked_by:
            control.ask(1)
        if step == 4 and collectives.rank == stopped_by:
            control.stop()
        votes = torch.tensor((collectives.rank + 1, *control.votes(step)))
        collectives.all_reduce(votes)
        loss, *sums = votes.tolist()
        agreements.append(control.agreed(loss, sums))
        if agreements[-1].cut:
            control.made(step)
    return agreements


@pytest.mark.slow
def test_all_ranks_cut_and_stop_after_the_same_step_whoever_was_asked(tmp_path: Path) -> None:
    ranks = run_ranks(3, agree_on_rank, tmp_path, 2, 1)

    assert ranks[0] == ranks[1] == ranks[2]
    assert [each.cut for each in ranks[0]] == [False, True, False, False]
    assert [each.stop for each in ranks[0]] == [False, False, False, True]
    assert {each.loss for each in ranks[0]} == {6.0}


def sum_on_rank(collectives: Collectives, size: int) -> tuple[bytes, float]:
    values = torch.randn(size, generator=torch.Generator().manual_seed(collectives.rank))
    collectives.all_reduce(values)
    exact = sum(
        torch.randn(size, generator=torch.Generator().manual_seed(rank)).double()
        for rank in range(collectives.world_size)
    )
    return values.numpy().tobytes(), float((values - exact).abs().max())


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 7, 100_003])
def test_a_sum_over_ranks_has_the_same_bits_on_all_of_them(size: int) -> None:
    ranks = run_ranks(3, sum_on_rank, size)
    again = run_ranks(3, sum_on_rank, size)

    assert len({bits for bits, _ in ranks + again}) == 1
    assert max(error for _, error in ranks) < 1e-5
