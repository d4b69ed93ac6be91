"""The times of a step's stages."""

from __future__ import annotations

import pytest

from dlrm_trainer import stages as stages_module
from dlrm_trainer.stages import STEP, StepProfile


class Clock:
    """A monotonic clock that stands still between the seconds that a test lets pass."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(stages_module, "time", self)

    def monotonic(self) -> float:
        return self.now


def test_every_moment_of_a_step_goes_to_one_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    profile = StepProfile(rank=3)
    clock.now += 50  # the start is no step's

    for number, _ in enumerate(profile.after(range(100), "read")):
        clock.now += 2
        profile.apart("prefetch wait", 0.5)
        profile.lap("forward")
        clock.now += number % 2
        profile.lap("backward")
        if number == 7:
            clock.now += 10
            profile.lap("evaluation")
        profile.end_step()
        clock.now += 0.25

    found = {each.stage: each for each in profile.stages()}
    assert list(found) == ["read", "prefetch wait", "forward", "backward", "evaluation", STEP]
    assert {each.rank for each in found.values()} == {3}
    assert found["forward"].mean_seconds == found["forward"].p99_seconds == pytest.approx(1.5)
    assert found["prefetch wait"].mean_seconds == pytest.approx(0.5)
    assert (found["evaluation"].steps, found["evaluation"].mean_seconds) == (1, pytest.approx(10))
    assert found["backward"].median_seconds == pytest.approx(0.5)
    spent = sum(each.mean_seconds * each.steps for stage, each in found.items() if stage != STEP)
    assert found[STEP].mean_seconds * found[STEP].steps == pytest.approx(spent)
    assert spent == pytest.approx(clock.now - 150 - 0.25)  # all but what came after the last step


def test_hit_rates_are_of_the_accesses_since_the_note_before() -> None:
    profile = StepProfile(rank=0)

    for step, accesses, hits in ((10, 100, 20), (20, 100, 20), (30, 300, 170)):
        profile.served(step, accesses, hits)

    found = [(each.step, each.accesses, each.hit_rate) for each in profile.hit_rates()]
    assert found == [(10, 100, 0.2), (30, 200, 0.75)]
