"""The planner works in a child process: it may take long, crash or refuse, and the operator goes on."""

import asyncio
import math
import mmap
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import psutil
import pytest

from dlrm_api.hardware import HardwareProfile, parse_profile
from dlrm_api.job import parse_job
from dlrm_api.plan import plan_from_parts, plan_to_parts
from dlrm_api.progress import DataFiles
from dlrm_operator.clients.planner import MAX_IDLE_BYTES, TOO_LARGE, Planner, PlannerProcess
from dlrm_operator.controller.informers import read_job
from dlrm_operator.reconcile.state import JobKey, Planning, PlanQuestion, StoredPlan
from dlrm_planner import plan_job
from dlrm_testing.operator.operator_cluster import job_document

pytestmark = pytest.mark.slow
DEADLINE_S = 300
"""Of questions that take seconds of processor time: a busy machine gives them late."""


def question(traces: Mapping[str, str] | None = None, **spec: Any) -> PlanQuestion:
    return PlanQuestion(
        uid="u",
        generation=1,
        profile_version="",
        job=parse_job(job_document("demo", **spec)),
        profiles=(),
        traces=traces or {},
    )


LARGE_TABLES = [{"name": f"t{i}", "rows": 2 * 10**6, "dim": 16} for i in range(8)]


async def plan(asked: PlanQuestion, deadline_s: float) -> Planning:
    process = PlannerProcess()
    try:
        return await process.ask(asked, deadline_s)
    finally:
        await process.end()


def test_the_child_gives_the_plan_that_the_planner_makes() -> None:
    asked = question()

    answer = asyncio.run(plan(asked, 60))

    assert plan_from_parts(answer.parts) == plan_job(asked.job.spec, None)


def test_the_child_counts_the_reads_of_files_that_trainers_found() -> None:
    data = {"format": "parquet", "train": {"uris": ["s3://data/train"]}}
    asked = replace(question(data=data), data_files=DataFiles(files=9, rows=900, reads=18))

    answer = asyncio.run(plan(asked, 60))

    found = plan_from_parts(answer.parts)
    assert found == plan_job(asked.job.spec, None, data=asked.data_files)
    assert any(reason.startswith("9 data files of 900 rows, 2.0 reads each") for reason in found.reasons)


def test_the_child_continues_with_the_plan_before_it() -> None:
    asked = question(trainer={"replicas": 2, "hardware": "pool"})
    before, now = (
        parse_profile({"metadata": {"name": "pool"}, "spec": {"tiers": {"ddr": {"bytes": ddr}}}})
        for ddr in ("32Gi", "64Gi")
    )
    parts = plan_to_parts(plan_job(asked.job.spec, before))
    stored = StoredPlan(job=asked.job.model_dump_json(exclude_unset=True), parts=parts)

    answer = asyncio.run(plan(replace(asked, profiles=(now,), before=stored), 60))

    assert answer.parts == parts


def test_the_child_chooses_hardware_that_can_mount_its_tiers() -> None:
    def pool(name: str, price: float, ddr: str, **block: Any) -> HardwareProfile:
        tiers = {"ddr": {"bytes": ddr}, "block": {"bytes": "1Ti", **block}}
        return parse_profile({"metadata": {"name": name}, "spec": {"tiers": tiers, "pricePerHour": price}})

    pools = (pool("unmounted", 1, "1800Mi"), pool("mounted", 2, "1800Mi", hostPath="/mnt"), pool("large", 9, "64Gi"))
    asked = question(
        model={"denseFeatures": ["I1"], "bottomMlp": [8, 16], "topMlp": [8, 1], "tables": LARGE_TABLES},
        trainer={"objective": {"maxReplicas": 1}, "hardwareProfiles": ["unmounted", "mounted", "large"]},
    )

    found, kept = (asyncio.run(plan(replace(asked, profiles=pools, kept=name), 60)) for name in ("", "large"))

    assert found.plan is not None
    assert found.plan.choice is not None
    assert found.plan.choice.hardware == found.plan.hardware == "mounted"
    lacks = {each.hardware: each.lacks for each in found.plan.choice.rejected}
    assert "HardwareProfile unmounted does not say what to mount" in lacks["unmounted"]
    assert lacks["large"] == "costs 7.00 more per hour"
    assert kept.plan is not None
    assert kept.plan.hardware == "large"


def test_a_price_that_nothing_meets_is_told_from_other_refusals() -> None:
    rated = {"bytes": "64Gi", "readBytesPerSecond": 1e9, "writeBytesPerSecond": 1e9}
    spec = {"flopsPerSecond": 1e9, "tiers": {"ddr": rated}, "pricePerHour": 1}
    asked = question(trainer={"objective": {"maxReplicas": 1, "maxPricePerBillionSamples": 0}, "hardware": "a"})
    priced = replace(asked, profiles=(parse_profile({"metadata": {"name": "a"}, "spec": spec}),))

    answer = asyncio.run(plan(priced, 60))

    assert (answer.final, answer.unmet, answer.field) == (
        True, True, "spec.trainer.objective.maxPricePerBillionSamples",
    )  # fmt: skip


def test_a_refusal_is_final_and_keeps_the_planners_words() -> None:
    asked = question(trainer={"replicas": 1, "tierBudgets": {"ddr": "1Ki"}})

    answer = asyncio.run(plan(asked, 60))

    assert answer.final
    assert "tierBudgets" in answer.problem


def test_the_child_reads_the_traces_that_it_is_given() -> None:
    reference = "configmap:reuse"
    table = {"name": "a", "rows": 10, "dim": 4, "distribution": {"reference": reference}}
    asked = question({reference: "no trace"}, model={"tables": [table], "interaction": "dcn"})

    answer = asyncio.run(plan(asked, 60))

    assert answer.final
    assert answer.problem.startswith("spec.model.tables[0].distribution.reference: ")
    assert "configmap:reuse" in answer.problem


def test_tiers_that_nobody_mounts_are_refused_before_there_is_a_plan() -> None:
    table = {"name": "a", "rows": 10_000_000, "dim": 64}
    budgets = {"ddr": "1Gi", "block": "20Gi"}
    asked = question(model={"tables": [table], "interaction": "dcn"}, trainer={"tierBudgets": budgets})

    answer = asyncio.run(plan(asked, 60))

    assert answer.final
    assert "name a HardwareProfile with hostPath or storageClass of tiers.block" in answer.problem


def test_a_deadline_is_not_an_answer_and_leaves_no_child() -> None:
    me = psutil.Process()

    answer = asyncio.run(plan(question(), 0.05))  # less than Python takes to start

    assert answer.plan is None
    assert not answer.final
    assert "asked again" in answer.problem
    assert [child for child in me.children() if "dlrm_operator.clients.planner" in " ".join(child.cmdline())] == []


def grouped(tables: int, replicas: int, **template: Any) -> PlanQuestion:
    """A question of some 200 bytes of tables."""
    group = {"name": "t", "count": tables, "template": {"rows": 1_000_000, "dim": 16, **template}}
    return question(
        model={"tableGroups": [group], "interaction": "dcn"},
        data={"format": "synthetic", "globalBatchSize": 65_536, "virtualShards": 65_536},
        trainer={"replicas": replicas},
    )


def test_too_many_shards_are_refused_for_good() -> None:
    answer = asyncio.run(plan(grouped(5_000, 4_096, pin={"sharding": "row"}), DEADLINE_S))

    assert answer.final
    assert answer.problem.startswith("spec.model.tableGroups[0].template.pin.sharding: 5000 tables are pinned")
    assert "20480000 shards" in answer.problem


IN_PYTHON = "planner.MAX_PLANNING_BYTES = 2 * 2**20"
IN_PYDANTIC = """
kept = planner.plan_to_parts
def plan_to_parts(plan):
    planner.limit_memory(2**20)
    return kept(plan.model_copy(update={"tables": plan.tables * 40}))
planner.plan_to_parts = plan_to_parts
"""
"""More tables than the memory holds that planning freed."""


@pytest.mark.parametrize("limit", [IN_PYTHON, IN_PYDANTIC])
def test_planning_beyond_the_memory_limit_is_refused(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    start = asyncio.create_subprocess_exec

    async def tightly(*_: str, **pipes: Any) -> Any:
        program = f"from dlrm_operator.clients import planner\n{limit}\nplanner.main()"
        return await start(sys.executable, "-c", program, **pipes)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", tightly)

    async def run() -> tuple[Planning, Planning]:
        process = PlannerProcess()
        large = await process.ask(grouped(2_000, 128), DEADLINE_S)
        small = await process.ask(question(), DEADLINE_S)
        await process.end()
        return large, small

    large, small = asyncio.run(run())

    assert large == Planning(problem=TOO_LARGE, final=True, field="spec.trainer")
    assert small.plan is not None


@pytest.mark.parametrize(
    "asked", [grouped(5_000, 4_096), grouped(512, 127, pin={"sharding": "row"})], ids=["whole tables", "most shards"]
)
def test_a_production_job_is_planned_within_the_planners_memory(asked: PlanQuestion) -> None:
    answer = asyncio.run(plan(asked, DEADLINE_S))

    assert answer.problem == ""
    assert answer.plan is not None
    assert answer.plan.tables == ()  # the operator needs none of them
    assert len(plan_from_parts(answer.parts).tables) in (5_000, 512)


def test_an_answer_that_is_too_long_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dlrm_operator.clients.planner.MAX_ANSWER_BYTES", 100)

    answer = asyncio.run(plan(question(), 60))

    assert answer.plan is None
    assert not answer.final
    assert "limit 100" in answer.problem
    assert planner_children() == []


def test_the_event_loop_runs_while_the_planner_works() -> None:
    async def both() -> int:
        ticks = 0
        task = asyncio.create_task(plan(question(), 60))
        while not task.done():
            ticks += 1
            await asyncio.sleep(0.01)
        return ticks

    assert asyncio.run(both()) > 5


def planner_children() -> list[psutil.Process]:
    return [
        child for child in psutil.Process().children() if "dlrm_operator.clients.planner" in " ".join(child.cmdline())
    ]


async def answers(planner: Planner, keys: list[JobKey], asked: PlanQuestion, within_s: float = 60.0) -> list[JobKey]:
    """Ask for each job; in which order the answers came."""
    for key in keys:
        planner.request(key, asked)
    came: list[JobKey] = []
    deadline = time.monotonic() + within_s
    while len(came) < len(keys):
        assert time.monotonic() < deadline, came
        came += [key for key in keys if key not in came and planner.has_answered(key)]
        await asyncio.sleep(0.005)
    return came


KEYS = [JobKey("space", f"job-{number}") for number in range(20)]


def test_one_process_plans_many_jobs_in_the_order_in_which_they_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    # On a busy machine a question may take so long that a second process starts, and orders mix.
    monkeypatch.setattr("dlrm_operator.clients.planner.SLOW_S", math.inf)

    async def run() -> tuple[list[JobKey], set[int]]:
        planner, pids = Planner(60, lambda key: pids.update(child.pid for child in planner_children())), set()
        came = await answers(planner, KEYS, question())
        await planner.stop()
        return came, pids

    came, pids = asyncio.run(run())

    assert came == KEYS
    assert len(pids) == 1
    assert planner_children() == []


def test_equal_questions_need_no_planner() -> None:
    async def run() -> tuple[list[bool], Planning | None]:
        planner = Planner(60, lambda key: None)
        await answers(planner, KEYS[:1], question())
        planner.forget(KEYS[0])
        elsewhere = {"uri": "s3://other/prefix"}
        planner.request(KEYS[0], question())
        planner.request(KEYS[1], replace(question(checkpoint=elsewhere), uid="v"))
        planner.request(KEYS[2], replace(question(), uid="w", reserve=2**20))
        planner.request(KEYS[3], replace(question(), uid="x", profile_version="7"))
        planner.request(KEYS[4], replace(question({"configmap:a": "text"}), uid="y"))
        at_once = [planner.has_answered(key) for key in KEYS[:5]]
        found = planner.answer(KEYS[0], read_job({**job_document("job-0"), "metadata": META}), "")
        await planner.stop()
        return at_once, found

    at_once, found = asyncio.run(run())

    assert at_once == [True, True, False, False, False]
    assert planner_children() == []  # though one was to begin when all was stopped
    assert found is not None
    assert plan_from_parts(found.parts) == plan_job(question().job.spec, None)


def test_a_larger_checkpointer_request_is_planned_again() -> None:
    async def run() -> bool:
        planner = Planner(60, lambda key: None)
        await answers(planner, KEYS[:1], question())
        roomier = {"uri": "s3://bucket/prefix", "resources": {"limits": {"memory": "2Gi"}}}
        planner.request(KEYS[1], question(checkpoint=roomier))
        known = planner.has_answered(KEYS[1])
        await planner.stop()
        return known

    assert not asyncio.run(run())


def test_a_planner_that_was_started_ahead_answers_the_first_question() -> None:
    async def run() -> tuple[list[int], list[int]]:
        planner, answered = Planner(60, lambda key: answered.set()), asyncio.Event()
        await planner.start()
        started = [child.pid for child in planner_children()]
        planner.request(KEYS[0], question())
        await answered.wait()
        used = [child.pid for child in planner_children()]
        await planner.stop()
        return started, used

    started, used = asyncio.run(run())

    assert len(started) == 1
    assert used == started


def test_planner_is_kept_however_large_the_operator_is() -> None:
    async def run() -> list[psutil.Process]:
        process = PlannerProcess()
        await process.ask(question(), 60)
        stayed = planner_children()
        await process.end()
        return stayed

    large = bytearray(MAX_IDLE_BYTES)
    large[:: mmap.PAGESIZE] = bytes([1]) * len(range(0, MAX_IDLE_BYTES, mmap.PAGESIZE))

    assert len(asyncio.run(run())) == 1


def test_next_question_after_a_killed_planner_is_answered() -> None:
    async def run() -> tuple[Planning, Planning]:
        process = PlannerProcess()
        await process.ask(question(), 60)
        (child,) = planner_children()
        child.kill()
        killed = await process.ask(question(), 60)
        again = await process.ask(question(), 60)
        await process.end()
        return killed, again

    killed, again = asyncio.run(run())

    assert "exit code -9" in killed.problem
    assert not killed.final
    assert again.plan is not None


def test_job_that_is_edited_all_the_time_gets_its_plan() -> None:
    async def run() -> tuple[set[int], Planning | None]:
        planner, pids = Planner(60, lambda key: None), set()
        planner.request(KEYS[1], question())
        generation, deadline = 0, time.monotonic() + 60
        while not (planner.has_answered(KEYS[0]) and planner.has_answered(KEYS[1])):
            assert time.monotonic() < deadline
            generation += 1
            edited = {"restart": {"maxBackoff": f"{generation}s"}}
            planner.request(KEYS[0], replace(question(lifecycle=edited), generation=generation))
            pids |= {child.pid for child in planner_children()}
            await asyncio.sleep(0.02)
        spec = {"lifecycle": {"restart": {"maxBackoff": "1h"}}}
        job = read_job({**job_document("job-0", **spec), "metadata": {**META, "generation": generation + 1}})
        found = planner.answer(KEYS[0], job, "")
        await planner.stop()
        return pids, found

    pids, found = asyncio.run(run())

    assert len(pids) <= 2  # a second one where the first takes long to start
    assert found is not None


def test_a_job_that_changes_while_it_is_planned_is_planned_again() -> None:
    async def run() -> Planning | None:
        planner = Planner(60, lambda key: None)
        planner.request(KEYS[0], question())
        await asyncio.sleep(0.05)
        tables = [{"name": "c", "rows": 10, "dim": 4}]
        model = {"tables": tables, "interaction": "dcn"}
        planner.request(KEYS[0], replace(question(model=model), generation=2))
        job = read_job({**job_document("job-0", model=model), "metadata": {**META, "generation": 2}})
        deadline = time.monotonic() + 60
        while (found := planner.answer(KEYS[0], job, "")) is None and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        await planner.stop()
        return found

    found = asyncio.run(run())

    assert found is not None
    assert found.plan is not None


META = {"name": "job-0", "namespace": "space", "uid": "u", "resourceVersion": "1"}
