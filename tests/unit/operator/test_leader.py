"""One leads, the others follow, and whoever can't be sure to lead writes nothing."""

import asyncio
import logging
import time
from collections.abc import Mapping

import pytest

from dlrm_operator.api_client import JSON, ClusterUnavailableError
from dlrm_operator.controller.reconciler import ObjectFilter, set_log_context
from dlrm_operator.leader import FencedApi, Leader, LeaseTimes
from dlrm_operator.reconcile.state import JobKey
from dlrm_operator.settings import read_settings
from dlrm_testing.operator.memory_api import MemoryApi, Object

TIMES = LeaseTimes(duration_s=2.0, renew_deadline_s=1.2, renew_interval_s=0.3)
LEASE = "/apis/coordination.k8s.io/v1/namespaces/space/leases/dlrm-operator"


class LineDown(MemoryApi):
    """The way of one process to the API server, which may break."""

    def __init__(self, server: MemoryApi) -> None:
        super().__init__()
        self.server, self.down, self.delay_s = server, False, 0.0
        self.done_by: list[float] = []

    async def call(
        self,
        method: str,
        path: str,
        body: Object | None = None,
        query: Mapping[str, str] | None = None,
        accept: str = JSON,
        done_by: float = float("inf"),
    ) -> Object:
        self.done_by.append(done_by)
        if self.down:
            raise ClusterUnavailableError("the line is down")
        await asyncio.sleep(self.delay_s)
        return await self.server.call(method, path, body, query, accept)


def leader(api: MemoryApi, identity: str, times: LeaseTimes = TIMES) -> Leader:
    return Leader(api, "space", identity, times, lambda: None)


async def until_held(candidate: Leader, within_s: float = 10.0) -> float:
    """The seconds that it took."""
    began = time.monotonic()
    while not candidate.held:
        assert time.monotonic() < began + within_s
        await asyncio.sleep(0.01)
    return time.monotonic() - began


@pytest.mark.slow
def test_a_follower_takes_over_only_after_the_leader_died() -> None:
    async def run() -> tuple[bool, float]:
        server = MemoryApi()
        line = LineDown(server)
        first, second = leader(line, "a"), leader(server, "b")
        tasks = [asyncio.create_task(first.run())]
        await until_held(first)
        tasks.append(asyncio.create_task(second.run()))
        await asyncio.sleep(3 * TIMES.duration_s)
        both = second.held
        line.down = True
        began = time.monotonic()
        while not second.held:
            assert time.monotonic() < began + 10
            await asyncio.sleep(0.01)
        both = both or first.held
        for task in tasks:
            task.cancel()
        return both, time.monotonic() - began

    both, taken_s = asyncio.run(run())

    assert not both
    assert TIMES.duration_s - TIMES.renew_interval_s <= taken_s


@pytest.mark.slow
def test_a_lease_that_is_released_is_taken_at_once() -> None:
    async def run() -> tuple[bool, float]:
        server, times = MemoryApi(), LeaseTimes(duration_s=60, renew_deadline_s=40, renew_interval_s=20)
        first, second = leader(server, "a", times), leader(server, "b", times)
        task = asyncio.create_task(first.run())
        await until_held(first)
        follower = asyncio.create_task(second.run())
        await asyncio.sleep(0.2)
        task.cancel()
        await first.release()
        taken_s = await until_held(second)
        follower.cancel()
        return first.held, taken_s

    held, taken_s = asyncio.run(run())

    assert not held
    assert taken_s < 15  # without the release it looks again after 20 s


@pytest.mark.slow
def test_deleted_lease_creates_no_second_leader() -> None:
    async def run() -> None:
        server = MemoryApi()
        first, second = leader(server, "a"), leader(server, "b")
        await first.step()
        await second.step()
        for _ in range(3):
            del server.objects[LEASE]
            await second.step()
            beside = second.held
            await first.step()
            assert (first.held, beside) == (True, False)
            assert LEASE in server.objects
        del server.objects[LEASE]  # and nobody who held it is there any more
        await second.step()
        at_once = second.held
        await asyncio.sleep(TIMES.duration_s)
        await second.step()
        assert (at_once, second.held, first.held) == (False, True, False)

    asyncio.run(run())


def test_a_process_that_comes_back_under_its_name_need_not_wait() -> None:
    async def run() -> float:
        server = MemoryApi()
        killed = asyncio.create_task(leader(server, "pod-0").run())
        await asyncio.sleep(0.1)
        killed.cancel()
        again = leader(server, "pod-0", LeaseTimes(duration_s=60, renew_deadline_s=40, renew_interval_s=20))
        task = asyncio.create_task(again.run())
        taken_s = await until_held(again)
        task.cancel()
        return taken_s

    assert asyncio.run(run()) < 5


def test_writes_are_abandoned_before_another_may_lead() -> None:
    async def run() -> None:
        server = MemoryApi()
        server.put("/api/v1/namespaces/space/pods/a", {"metadata": {"name": "a"}})
        line = LineDown(server)
        candidate = leader(server, "a")
        fenced = FencedApi(line, candidate)

        await fenced.call("GET", "/api/v1/namespaces/space/pods/a")
        with pytest.raises(ClusterUnavailableError, match="is not the leader"):
            await fenced.call("POST", "/api/v1/namespaces/space/pods", {"metadata": {"name": "b"}})
        refused = len(line.done_by)
        before = time.monotonic()
        task = asyncio.create_task(candidate.run())
        await until_held(candidate)
        await fenced.call("POST", "/api/v1/namespaces/space/pods", {"metadata": {"name": "b"}})
        task.cancel()

        assert refused == 1
        assert before <= line.done_by[-1] - TIMES.duration_s <= time.monotonic()

    asyncio.run(run())


@pytest.mark.slow
def test_whoever_can_t_reach_the_server_stops_to_lead_by_itself() -> None:
    async def run() -> float:
        line = LineDown(MemoryApi())
        candidate = leader(line, "a")
        task = asyncio.create_task(candidate.run())
        await until_held(candidate)
        line.down = True
        began = time.monotonic()
        while candidate.held:
            await asyncio.sleep(0.01)
        task.cancel()
        return time.monotonic() - began

    assert asyncio.run(run()) <= TIMES.renew_deadline_s + 0.5


@pytest.mark.slow
def test_a_server_that_takes_long_for_each_request_is_led_without_a_gap() -> None:
    async def run() -> tuple[list[bool], list[tuple[str, str]]]:
        line = LineDown(MemoryApi())
        line.delay_s = 0.28
        candidate = leader(line, "a", LeaseTimes(duration_s=1.5, renew_deadline_s=1.0, renew_interval_s=0.5))
        task = asyncio.create_task(candidate.run())
        await until_held(candidate)
        line.server.asked.clear()
        held = []
        for _ in range(150):
            held.append(candidate.held)
            await asyncio.sleep(0.02)
        task.cancel()
        return held, line.server.asked

    held, asked = asyncio.run(run())

    assert all(held)
    assert {method for method, _ in asked} == {"PUT"}


def test_expired_lead_is_published_as_lost_and_won() -> None:
    async def run() -> list[bool]:
        told: list[bool] = []
        times = LeaseTimes(duration_s=60, renew_deadline_s=0.1, renew_interval_s=0.05)
        candidate = Leader(MemoryApi(), "space", "a", times, lambda: told.append(candidate.held))
        for _ in range(2):
            await candidate.step()
            await asyncio.sleep(0.2)
        return told

    assert asyncio.run(run()) == [True, False, True]


def test_times_that_would_let_two_lead_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        read_settings(["--lease-duration-seconds", "8", "--lease-renew-deadline-seconds", "8"], {})

    assert "--lease-duration-seconds" in capsys.readouterr().err


def test_a_pod_leads_under_its_name_in_its_namespace() -> None:
    settings = read_settings([], {"POD_NAME": "dlrm-operator-7f", "POD_NAMESPACE": "platform"})

    assert settings.identity == "dlrm-operator-7f"
    assert settings.lease_namespace == "platform"


def test_every_log_line_of_a_reconcile_names_its_object() -> None:
    async def reconcile(key: JobKey) -> logging.LogRecord:
        set_log_context(key, "u-1")
        record = logging.makeLogRecord({"msg": "the API server refused"})
        ObjectFilter().filter(record)
        return record

    async def run() -> logging.LogRecord:
        first, _ = await asyncio.gather(reconcile(JobKey("space", "demo")), reconcile(JobKey("space", "other")))
        return first

    record = asyncio.run(run())

    assert record.k8s_ref == {
        "apiVersion": "dlrm.dev/v1alpha1",
        "kind": "DLRMJob",
        "namespace": "space",
        "name": "demo",
        "uid": "u-1",
    }
