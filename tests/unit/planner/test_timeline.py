"""When a step ends: what overlaps, what is exposed, and what bounds it."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrm_api.plan import STEP_STAGES
from dlrm_planner.timeline import StepWork, TierWork, TrainingWork, lay_out

SECONDS = st.floats(0, 10)
WORK = st.builds(TrainingWork, **{each.name: SECONDS for each in fields(TrainingWork)}).map(
    lambda work: replace(work, collectives_s=min(work.collectives_s, work.interpreted_s))
)


def slower(work: TrainingWork, times: float) -> TrainingWork:
    return TrainingWork(**{each.name: getattr(work, each.name) * times for each in fields(TrainingWork)})


@st.composite
def steps(draw: st.DrawFn) -> StepWork:
    alone = draw(WORK)
    tiers = draw(st.dictionaries(st.sampled_from(["scm", "block"]), st.builds(TierWork, device_s=SECONDS)))
    read_s = draw(SECONDS)
    return StepWork(
        alone=alone,
        beside=slower(alone, draw(st.floats(1, 3))),
        read_s=read_s,
        read_alone_s=read_s * draw(st.floats(0, 1)),
        ids_s=draw(SECONDS),
        tiers=tiers,
        prefetches=draw(st.booleans()),
    )


@given(steps())
def test_a_step_takes_no_less_than_any_resource_and_no_more_than_their_sum(work: StepWork) -> None:
    found = lay_out(work)

    tiers = [each.device_s for each in work.tiers.values()]
    assert found.step_s >= max(work.alone.total_s, work.read_alone_s, *tiers) * (1 - 1e-9)
    assert found.step_s <= (work.beside.total_s + work.read_s + work.ids_s + sum(tiers)) * (1 + 1e-9)
    assert 0 <= found.exposed_link_s <= found.training_s * (1 + 1e-9)
    assert sum(found.exposed_tiers_s.values()) <= found.step_s * (1 + 1e-9)


@given(steps())
def test_the_stages_of_a_step_add_up_to_it(work: StepWork) -> None:
    found = lay_out(work)

    assert set(found.stages_s) == set(STEP_STAGES)
    assert min(found.stages_s.values()) >= -1e-9
    assert sum(found.stages_s.values()) == pytest.approx(found.step_s)
    assert found.stages_s["tiers"] >= sum(found.exposed_tiers_s.values()) * (1 - 1e-9)


def test_a_step_that_waits_for_its_reader_says_so() -> None:
    work = TrainingWork(interpreted_s=1, lookup_s=0, update_s=0, bottom_s=0, top_s=0, dense_update_s=0)

    found = lay_out(StepWork(alone=work, beside=work, read_s=3, read_alone_s=3))

    assert found.stages_s["read"] == pytest.approx(2)


def test_a_reader_that_training_waits_for_has_the_processors_for_itself() -> None:
    work = TrainingWork(interpreted_s=1, lookup_s=0, update_s=0, bottom_s=0, top_s=0, dense_update_s=0)

    found = lay_out(StepWork(alone=work, beside=slower(work, 2), read_s=3, read_alone_s=1.5))

    # Two of its three seconds pass beside training; the rest takes half as long.
    assert found.step_s == pytest.approx(2 + 0.5)
    assert found.stages_s["read"] == pytest.approx(0.5)


@given(steps(), st.sampled_from([each.name for each in fields(TrainingWork)]), SECONDS)
def test_more_work_never_ends_a_step_earlier(work: StepWork, name: str, more_s: float) -> None:
    more = replace(
        work,
        alone=replace(work.alone, **{name: getattr(work.alone, name) + more_s}),
        beside=replace(work.beside, **{name: getattr(work.beside, name) + 3 * more_s}),
    )
    # Work that hides communication may take its place, but not more.
    assert lay_out(more).step_s >= lay_out(work).step_s * (1 - 1e-9)


def test_communication_is_exposed_as_far_as_nothing_hides_it() -> None:
    work = TrainingWork(
        interpreted_s=0, lookup_s=1, update_s=2, bottom_s=3, top_s=4, dense_update_s=0,
        pooled_s=1.5, gradients_s=1, reduce_s=2.5,
    )  # fmt: skip

    assert work.exposed_s == pytest.approx(0.5 + 0 + 0.5)
    assert work.total_s == pytest.approx(1 + 2 + 3 + 4 + 1)


@pytest.mark.parametrize(
    ("change", "bound"),
    [
        ({"read_s": 20.0, "read_alone_s": 20.0}, "reader"),
        ({"files_s": 20.0}, "files"),
        ({"tiers": {"block": TierWork(device_s=20.0)}}, "block"),
        ({}, "compute"),
    ],
)
def test_what_takes_longest_bounds_a_step(change: dict[str, object], bound: str) -> None:
    alone = TrainingWork(interpreted_s=1, lookup_s=1, update_s=1, bottom_s=1, top_s=4, dense_update_s=0)
    work = replace(StepWork(alone=alone, beside=slower(alone, 1.5)), **change)

    assert lay_out(work).bound == bound


def test_rows_that_are_not_fetched_ahead_are_waited_for() -> None:
    alone = TrainingWork(interpreted_s=1, lookup_s=0, update_s=0, bottom_s=0, top_s=4, dense_update_s=0)
    work = StepWork(alone=alone, beside=alone, tiers={"block": TierWork(device_s=3)})

    assert lay_out(work).step_s == pytest.approx(5)
    assert lay_out(replace(work, prefetches=False)).step_s == pytest.approx(8)
