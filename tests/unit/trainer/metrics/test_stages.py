"""The times of a step's stages."""

from __future__ import annotations

import threading
import time
from itertools import pairwise

import numpy as np
import pytest

from dlrm_api.plan import STEP_STAGES
from dlrm_api.tiers import TIERS
from dlrm_trainer import spans as spans_module
from dlrm_trainer.metrics import stages as stages_module
from dlrm_trainer.metrics.stages import (
    NUMBERS,
    STAGES,
    START_UP_STEPS,
    STEP,
    WINDOW_S,
    WORDS,
    Stages,
    StepCounters,
    StepMeter,
    StepMetrics,
    StepProfile,
)
from dlrm_trainer.spans import NEWEST_STEPS, Spans, each_spanned, keep_spans, spanned


@pytest.fixture(autouse=True)
def keep_nothing_after_a_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spans_module, "_kept", None)


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


def test_the_longest_and_the_last_maintenance_of_a_rank_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    ranks = [StepCounters(rank, np.zeros(WORDS, np.int64)) for rank in range(2)]
    of_rank_1 = StepProfile(1, ranks[1].stage_ns, ranks[1].maintenance_ns)

    for seconds in (1, 3, 2):
        clock.now += 10
        of_rank_1.lap("agreement")
        clock.now += seconds
        of_rank_1.lap("maintenance")
        of_rank_1.end_step()

    served = [each for family in StepMetrics(ranks).collect() for each in family.samples if "maintenance_" in each.name]
    assert [(each.labels, each.value) for each in served] == [({"rank": "1"}, 3), ({"rank": "1"}, 2)]
    assert {each.stage: each.longest_seconds for each in of_rank_1.stages()}[STEP] == 13


def stepped(profile: StepProfile, clock: Clock) -> None:
    for stage in ("forward", "records"):
        clock.now += 1
        profile.lap(stage)


def test_stages_after_the_last_step_are_reported_separately(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    profile = StepProfile(rank=0)
    for _ in range(2):
        stepped(profile, clock)
        clock.now += 5
        profile.lap("evaluation")
        profile.end_step()
    clock.now += 7
    profile.lap("evaluation")

    found = {each.stage: each for each in profile.stages()}

    assert list(found) == ["forward", "records", "evaluation", STEP, "evaluation at the end"]
    assert found[STEP].mean_seconds == pytest.approx(7)
    assert (found["evaluation"].steps, found["evaluation"].mean_seconds) == (2, pytest.approx(5))
    assert (found["evaluation at the end"].steps, found["evaluation at the end"].mean_seconds) == (1, pytest.approx(7))


def test_a_step_that_a_signal_ended_is_a_step_with_its_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    profile = StepProfile(rank=0)
    stepped(profile, clock)
    clock.now += 3
    profile.lap("cut")

    found = {each.stage: each for each in profile.stages()}

    assert list(found) == ["forward", "records", "cut", STEP]
    assert found[STEP].mean_seconds == pytest.approx(5)


def test_hit_rates_are_of_the_accesses_since_the_note_before() -> None:
    profile = StepProfile(rank=0)

    for step, accesses, hits in ((10, 100, 20), (20, 100, 20), (30, 300, 170)):
        profile.served(step, accesses, hits)

    found = [(each.step, each.accesses, each.hit_rate) for each in profile.hit_rates()]
    assert found == [(10, 100, 0.2), (30, 200, 0.75)]


def test_totals_of_stages_are_added_up_without_a_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, totals = Clock(monkeypatch), np.zeros(len(STAGES), np.int64)
    stages = Stages(totals)

    for _ in range(3):
        clock.now += 2
        stages.apart("exchange", 0.5)
        stages.lap("forward")
        stages.end_step()

    assert totals[NUMBERS["forward"]] == 4_500_000_000
    assert totals[NUMBERS["exchange"]] == 1_500_000_000
    assert totals.sum() == 6_000_000_000


def test_a_trace_shows_what_every_thread_did_in_the_newest_steps() -> None:
    profile = StepProfile(rank=3)

    @spanned("send ids")
    def send() -> None:
        profile.trace()

    def work() -> None:
        for _ in each_spanned(range(2), "read"):
            send()

    for _ in profile.after(range(NEWEST_STEPS + 5), "read"):
        profile.lap("forward")
        profile.end_step()
    thread = threading.Thread(target=work, name="dlrm-ids_0")
    thread.start()
    thread.join()

    events = profile.trace()
    threads = {each["tid"]: each["args"]["name"] for each in events if each["name"] == "thread_name"}
    spans = [(threads[each["tid"]], each["name"]) for each in events if each["ph"] == "X"]
    assert {each["pid"] for each in events} == {3}
    assert spans.count(("training", "forward")) == NEWEST_STEPS - 1  # whole steps since the end of the oldest
    assert spans.count(("ids", "send ids")) == spans.count(("ids", "read")) == 2
    times = [(each["ts"], each["dur"]) for each in events if each["ph"] == "X" and threads[each["tid"]] == "training"]
    assert all(start + length <= after + 1 for (start, length), (after, _) in pairwise(times))


def test_spans_are_kept_only_where_they_were_asked_for() -> None:
    double = spanned("double")(lambda number: 2 * number)
    before = double(2)
    kept: Spans = keep_spans()

    assert (before, double(3)) == (4, 6)
    assert [each["name"] for each in kept.events(0) if each["ph"] == "X"] == ["double"]


def test_a_stage_of_a_profile_ends_when_the_gpu_has_done_its_work() -> None:
    waits: list[float] = []

    def finish() -> None:
        time.sleep(0.02)
        waits.append(0.02)

    profile = StepProfile(0, finish=finish)
    profile.start()
    profile.lap("forward")
    profile.lap("backward")
    profile.end_step()

    assert len(waits) == 2
    assert all(each.mean_seconds >= 0.02 for each in profile.stages() if each.stage != "step")


def test_each_stage_but_cut_and_evaluation_is_part_of_a_predicted_step() -> None:
    covered = [stage for stages in STEP_STAGES.values() for stage in stages]

    assert sorted([*covered, "cut", "evaluation"]) == sorted(STAGES)


class MeteredSteps:
    """Steps of which a test says how long each stage took."""

    def __init__(self) -> None:
        self.totals = np.zeros(len(STAGES), np.int64)
        self.meter = StepMeter(self.totals)

    def make(self, steps: int, served: dict[str, int] | None = None, **seconds: float) -> None:
        for _ in range(steps):
            for stage, spent_s in seconds.items():
                self.totals[STAGES.index(stage)] += round(spent_s * 1e9)  # type: ignore[arg-type]
            self.meter.stepped(100, [float((served or {}).get(tier, 0)) for tier in TIERS])


def test_measured_steps_leave_out_start_cuts_and_evaluations() -> None:
    run = MeteredSteps()
    run.make(START_UP_STEPS - 1, forward=10)
    assert run.meter.measured() is None
    run.make(1, forward=10)
    assert run.meter.measured() is None  # no step after the start yet

    run.make(10, forward=0.25, backward=0.25, exchange=0.5, cut=3, evaluation=5)
    found = run.meter.measured()

    assert found is not None
    assert (found.step_seconds, found.samples_per_second, found.trained_seconds) == pytest.approx((1, 100, 10))
    assert {stage: s for stage, s in found.stage_seconds.items() if s} == pytest.approx(
        {"compute": 0.5, "exchange": 0.5}
    )
    assert found.hit_rates == {}


def test_measured_steps_are_those_of_the_last_minute() -> None:
    run = MeteredSteps()
    run.make(START_UP_STEPS)
    assert run.meter.measured() is None
    for _ in range(200):
        run.make(1, {"ddr": 1, "block": 1}, forward=1)
        run.meter.measured()
    for _ in range(round(WINDOW_S / 2)):
        run.make(1, {"ddr": 4, "block": 1}, forward=2)
        found = run.meter.measured()

    assert found is not None
    assert found.step_seconds == pytest.approx(2)
    assert found.hit_rates == pytest.approx({"ddr": 0.8, "block": 0.2})
    assert found.trained_seconds == pytest.approx(200 + WINDOW_S)
