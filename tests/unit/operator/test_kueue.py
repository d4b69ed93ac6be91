"""Check which version of Kueue's API is used, and that its message is read only while a gang waits."""

import asyncio
from typing import Any, cast

import pytest

from dlrm_operator.api_client import Api, ClusterUnavailableError, NotFoundError
from dlrm_operator.clients import kueue as module
from dlrm_operator.clients.kueue import KueueClient, Workloads, quota_message
from dlrm_operator.reconcile.state import JobKey
from dlrm_testing.operator.memory_api import MemoryApi

KEY = JobKey("space", "demo")
GROUP = "/apis/kueue.x-k8s.io"
PATH = f"{GROUP}/v1beta2/namespaces/space/workloads/demo-1"
WORDS = "couldn't assign flavors to pod set main: insufficient unused quota for cpu in flavor any, 2 more needed"


def workload(**conditions: tuple[str, str]) -> dict[str, Any]:
    found = [{"type": kind, "status": truth, "message": words} for kind, (truth, words) in conditions.items()]
    return {"metadata": {"name": "demo-1", "namespace": "space"}, "status": {"conditions": found}}


def served(*versions: str) -> MemoryApi:
    """An API server that serves Kueue in these versions, with one Workload in each."""
    api = MemoryApi()
    api.put(GROUP, {"metadata": {}, "versions": [{"version": version} for version in versions]})
    for version in versions:
        api.put(PATH.replace("v1beta2", version), workload(QuotaReserved=("False", version)))
    return api


def message(workloads: Workloads) -> str:
    return quota_message(asyncio.run(workloads.get("space", "demo-1")))


@pytest.mark.parametrize(
    ("versions", "used"),
    [
        (("v1beta1",), "v1beta1"),
        (("v1beta1", "v1beta2"), "v1beta2"),
        (("v1beta2",), "v1beta2"),
        (("v2", "v1beta1"), "v1beta1"),
    ],
)
def test_the_newest_served_version_is_looked_up_once(versions: tuple[str, ...], used: str) -> None:
    api = served(*versions)
    workloads = Workloads(cast("Api", api))

    read = [message(workloads) for _ in range(3)]

    assert read == [used] * 3
    assert api.asked.count(("GET", GROUP)) == 1


def test_an_upgrade_of_kueue_is_noticed_when_its_old_version_is_gone() -> None:
    api = served("v1beta1")
    workloads = Workloads(cast("Api", api))

    before = message(workloads)
    api.objects = served("v1beta2").objects
    after = [message(workloads) for _ in range(2)]

    assert (before, after) == ("v1beta1", ["v1beta2"] * 2)
    assert api.asked.count(("GET", GROUP)) == 2


def test_a_missing_workload_or_kueue_is_not_found_until_it_appears() -> None:
    api = served("v1beta2")
    saved = dict(api.objects)
    workloads = Workloads(cast("Api", api))

    for missing in (PATH, GROUP):
        del api.objects[missing]
        with pytest.raises(NotFoundError):
            message(workloads)
    api.objects = saved

    assert message(workloads) == "v1beta2"


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ({}, ""),
        (workload(), ""),
        (workload(QuotaReserved=("False", WORDS)), WORDS),
        (workload(QuotaReserved=("True", "Quota reserved"), Admitted=("False", "checks wait")), "checks wait"),
        (workload(QuotaReserved=("True", "Quota reserved")), ""),
    ],
)
def test_the_words_are_those_of_the_condition_that_lacks(document: dict[str, Any], words: str) -> None:
    assert quota_message(document) == words


def test_a_gang_that_waits_is_asked_for_until_it_waits_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SCHEDULE_INTERVAL_S", 0.01)
    monkeypatch.setattr(module, "POLL_INTERVAL_S", 0.02)
    api, woken = served("v1beta2"), list[JobKey]()
    api.put(PATH, workload(QuotaReserved=("False", WORDS)))
    queues = KueueClient(cast("Api", api), woken.append)

    async def a_while() -> tuple[str, int]:
        asking = asyncio.create_task(queues.run())
        queues.follow(KEY, "demo-1")
        await asyncio.sleep(0.3)
        said = queues.message(KEY)
        queues.follow(KEY, "")
        asked = len(api.asked)
        await asyncio.sleep(0.1)
        asking.cancel()
        return said, asked

    said, asked = asyncio.run(a_while())

    assert said == WORDS
    assert asked >= 2
    assert len(api.asked) == asked
    assert woken == [KEY]
    assert queues.message(KEY) == ""


def test_an_api_server_that_does_not_answer_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SCHEDULE_INTERVAL_S", 0.01)

    class Away:
        async def call(self, *_: object) -> None:
            raise ClusterUnavailableError("away")

    queues = KueueClient(cast("Api", Away()), lambda key: None)

    async def a_while() -> bool:
        asking = asyncio.create_task(queues.run())
        queues.follow(KEY, "demo-1")
        await asyncio.sleep(0.1)
        alive = not asking.done()
        asking.cancel()
        return alive

    assert asyncio.run(a_while())
