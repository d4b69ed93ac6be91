"""Check that Kueue's message is read now and then, and only while a gang waits."""

import asyncio
from typing import Any, cast

import pytest

from dlrm_operator.api_client import Api, ClusterUnavailableError
from dlrm_operator.clients import kueue as module
from dlrm_operator.clients.kueue import KueueClient, quota_message
from dlrm_operator.reconcile.state import JobKey
from dlrm_testing.operator.memory_api import MemoryApi

KEY = JobKey("space", "demo")
PATH = "/apis/kueue.x-k8s.io/v1beta1/namespaces/space/workloads/demo-1"
WORDS = "couldn't assign flavors to pod set main: insufficient unused quota for cpu in flavor any, 2 more needed"


def workload(**conditions: tuple[str, str]) -> dict[str, Any]:
    found = [{"type": kind, "status": truth, "message": words} for kind, (truth, words) in conditions.items()]
    return {"metadata": {"name": "demo-1", "namespace": "space"}, "status": {"conditions": found}}


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
    api, woken = MemoryApi(), list[JobKey]()
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
