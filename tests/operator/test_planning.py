"""The planner works in a child process: it may take long, crash or refuse, and the operator goes on."""

import asyncio
from collections.abc import Mapping
from typing import Any

import psutil
import pytest
from operator_cluster import job_document

from dlrm_api.job import parse_job
from dlrm_operator.actions import PlanQuestion
from dlrm_operator.planning import plan_in_child
from dlrm_planner import plan_job

pytestmark = pytest.mark.slow


def question(traces: Mapping[str, str] | None = None, **spec: Any) -> PlanQuestion:
    return PlanQuestion(
        uid="u",
        generation=1,
        profile_version="",
        job=parse_job(job_document("demo", **spec)),
        profile=None,
        traces=traces or {},
    )


def test_the_child_gives_the_plan_that_the_planner_makes() -> None:
    asked = question()

    answer = asyncio.run(plan_in_child(asked, 60))

    assert answer.plan == plan_job(asked.job.spec, None)


def test_a_refusal_is_final_and_keeps_the_planners_words() -> None:
    asked = question(trainer={"replicas": 1, "tierBudgets": {"ddr": "1Ki"}})

    answer = asyncio.run(plan_in_child(asked, 60))

    assert answer.final
    assert "tierBudgets" in answer.problem


def test_the_child_reads_the_traces_that_it_is_given() -> None:
    reference = "configmap:reuse"
    table = {"name": "a", "rows": 10, "dim": 4, "distribution": {"reference": reference}}
    asked = question({reference: "no trace"}, model={"tables": [table], "interaction": "dcn"})

    answer = asyncio.run(plan_in_child(asked, 60))

    assert answer.final
    assert "spec.model.tables[0].distribution.reference: configmap:reuse holds no trace" in answer.problem


def test_tiers_that_nobody_mounts_are_refused_before_there_is_a_plan() -> None:
    table = {"name": "a", "rows": 10_000_000, "dim": 64}
    budgets = {"ddr": "1Gi", "block": "20Gi"}
    asked = question(model={"tables": [table], "interaction": "dcn"}, trainer={"tierBudgets": budgets})

    answer = asyncio.run(plan_in_child(asked, 60))

    assert answer.final
    assert "name a HardwareProfile whose tiers.block has hostPath or storageClass" in answer.problem


def test_a_deadline_is_no_verdict_and_leaves_no_child() -> None:
    me = psutil.Process()

    answer = asyncio.run(plan_in_child(question(), 0.05))  # less than Python takes to start

    assert answer.plan is None
    assert not answer.final
    assert "asked again" in answer.problem
    assert [child for child in me.children() if "plan_child" in " ".join(child.cmdline())] == []


def test_the_loop_turns_while_the_planner_works() -> None:
    async def both() -> int:
        ticks = 0
        task = asyncio.create_task(plan_in_child(question(), 60))
        while not task.done():
            ticks += 1
            await asyncio.sleep(0.01)
        return ticks

    assert asyncio.run(both()) > 5
