"""A rank with a slow reader: its own time shows it, and that of the others shows that they wait."""

from __future__ import annotations

import json
import os
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from dlrm_api.names import Env, ExitCode
from dlrm_api.progress import Progress, TrainerPhase
from dlrm_api.run_report import Profile
from dlrm_operator.reconcile.health import read_stacks
from dlrm_testing.trainer.gangs import Pod, job_document, plan_document, small_job

SUPPORT = Path(__file__).parents[3] / "support"

SLOW, STEPS = 1, 40
DELAY_S = 0.2  # several times as long as a step takes a busy machine: a reader works while its rank trains


def stage_seconds(pod: Pod) -> dict[tuple[str, ...], float]:
    """Seconds by rank and stage, as Prometheus sees them."""
    return {
        (sample.labels["rank"], sample.labels["stage"]): sample.value
        for family in text_string_to_metric_families(ask(pod, "metrics"))
        if family.name == "dlrm_trainer_stage_seconds"
        for sample in family.samples
        if sample.name.endswith("_total")
    }


def progress(pod: Pod) -> Progress:
    """Return the progress that the pod's endpoint reports."""
    return Progress.model_validate_json(ask(pod, "progress"))


def ask(pod: Pod, path: str) -> str:
    """Return the answer of the pod's endpoint."""
    with urllib.request.urlopen(f"http://127.0.0.1:{pod.port}/{path}", timeout=20) as answer:
        text: str = answer.read().decode()
    return text


@pytest.mark.slow
def test_a_slow_reader_shows_on_its_rank_and_as_waiting_on_the_other(tmp_path: Path) -> None:
    few_ahead = {"prefetchBytes": "128Ki"}  # else a reader gets far ahead while the first steps compile
    changes: dict[str, Any] = {"training": {"maxSteps": STEPS}, "data": few_ahead}
    environment = {
        Env.HANDOFF_DIR: "",
        Env.LEDGER_DIR: "",
        Env.PROFILE: "1",
        "FAULT": f"{SLOW} read 0 {DELAY_S}",
        "PYTHONPATH": os.pathsep.join((str(SUPPORT), os.environ.get("PYTHONPATH", ""))),
    }
    plan = plan_document(small_job(tmp_path, 2, **changes))
    pod = Pod(tmp_path, job_document(tmp_path, 2, **changes), plan, **environment)
    pod.module = "dlrm_testing.trainer.slow_trainer"

    pod.start(checkpointer=False)
    pod.wait_for_step(10)  # the first ones compile
    before = stage_seconds(pod)
    pod.wait_for_step(STEPS - 5)  # the ranks have compared their times after step 32
    after = stage_seconds(pod)
    slowest = progress(pod).slowest
    assert pod.wait() == ExitCode.DONE, pod.log()

    assert slowest is not None
    assert slowest.rank == SLOW
    assert slowest.seconds > DELAY_S / 2
    assert slowest.seconds > 2 * slowest.median_seconds
    profile = Profile.model_validate_json((pod.work / "profile.json").read_text())
    of_a_step = {(str(each.rank), each.stage): each.median_seconds for each in profile.stages}
    since = {key: seconds - before[key] for key, seconds in after.items()}
    slow, other = str(SLOW), str(1 - SLOW)
    for times in (since, of_a_step):
        assert times[slow, "read"] > 3 * times[other, "read"], times
        assert times[other, "exchange"] + times[other, "agreement"] > 0.5 * times[slow, "read"], times
    assert of_a_step[slow, "read"] > DELAY_S / 2
    events = json.loads((pod.work / "trace.json").read_text())["traceEvents"]
    threads = {(each["pid"], each["tid"]): each["args"]["name"] for each in events if each["name"] == "thread_name"}
    spans = {(each["pid"], threads[each["pid"], each["tid"]], each["name"]) for each in events if each["ph"] == "X"}
    for rank in (0, 1):
        assert {(rank, "training", "forward"), (rank, "ids", "send ids"), (rank, "reader", "read")} <= spans
    read = [each["dur"] for each in events if (each["pid"], each["name"]) == (SLOW, "read")]
    assert max(read) > DELAY_S * 1e6
    assert not list(pod.work.glob("trace-*.json"))


@pytest.mark.slow
def test_a_hung_gang_shows_the_stacks_of_all_ranks_and_the_one_to_blame(tmp_path: Path) -> None:
    environment = {
        Env.HANDOFF_DIR: "",
        Env.LEDGER_DIR: "",
        "FAULT": f"{SLOW} read 10 600",
        "PYTHONPATH": os.pathsep.join((str(SUPPORT), os.environ.get("PYTHONPATH", ""))),
    }
    pod = Pod(tmp_path, job_document(tmp_path, 2), plan_document(small_job(tmp_path, 2)), **environment)
    pod.module = "dlrm_testing.trainer.slow_trainer"
    pod.start(checkpointer=False)
    try:
        pod.wait_for_step(8)
        time.sleep(2)  # the batches that were read ahead are trained on, and then it hangs
        first, stopped = progress(pod), ask(pod, "stacks")
        time.sleep(1)
        second = progress(pod)
    finally:
        pod.close()

    assert first.phase is TrainerPhase.TRAINING
    assert first.step == second.step
    assert first.longest_step_seconds is not None
    assert "slow_trainer.py" in stopped
    ranks = read_stacks(stopped)
    assert [each.rank for each in ranks] == [0, 1]
    assert [each.rank for each in ranks if not each.waits] == [SLOW]
