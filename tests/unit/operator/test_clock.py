"""Check that no wrong or adjusted clock of the operator's machine makes a deadline come early."""

import asyncio
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest

from dlrm_operator.api_client import KubernetesApi, ServerClock
from dlrm_operator.controller.handlers import Engine
from dlrm_operator.login import ClusterAccount
from dlrm_operator.reconcile.findings import parse_timestamp
from dlrm_operator.reconcile.reconcile import reconcile
from dlrm_operator.reconcile.state import DeleteObject, JobKey
from dlrm_operator.settings import Settings
from dlrm_testing.operator.memory_api import MemoryApi
from dlrm_testing.operator.operator_cluster import job_document
from dlrm_testing.operator.running_job import report_progress, running, status

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)
SECOND = timedelta(seconds=1)
HOUR = timedelta(hours=1)
JOB = "/apis/dlrm.dev/v1alpha1/namespaces/space/dlrmjobs/demo"


class Clocks:
    """The server's, this machine's that somebody sets, and a steady one."""

    def __init__(self, ahead: timedelta = timedelta()) -> None:
        self.passed_s, self.ahead = 0.0, ahead
        self.clock = ServerClock(lambda: self.server + self.ahead, lambda: 500 + self.passed_s)

    @property
    def server(self) -> datetime:
        return NOON + timedelta(seconds=self.passed_s)

    def answer(self, after_s: float) -> None:
        """The server answers after a while; what it says arrives a little later."""
        self.passed_s += after_s
        self.clock.hear(format_datetime(self.server, usegmt=True))
        self.passed_s += 0.3

    def wrong_by(self) -> timedelta:
        return abs(self.clock.now() - self.server)


@pytest.mark.parametrize("ahead", [-HOUR, HOUR, 11 * SECOND, -365 * 24 * HOUR])
def test_a_wrong_clock_is_put_right_by_the_servers(ahead: timedelta) -> None:
    clocks = Clocks(ahead)

    clocks.answer(0.7)

    assert clocks.wrong_by() <= 2 * SECOND
    clocks.passed_s += 7_200
    assert clocks.wrong_by() <= 2 * SECOND


@pytest.mark.parametrize("ahead", [-HOUR, HOUR])
def test_a_clock_that_is_set_while_it_runs_changes_nothing(ahead: timedelta) -> None:
    clocks = Clocks()
    clocks.answer(0.0)

    clocks.ahead = ahead

    assert clocks.wrong_by() <= 2 * SECOND


def test_a_server_whose_clock_is_set_is_followed_by_its_next_answer() -> None:
    clocks = Clocks()
    clocks.answer(0.0)
    clocks.clock.hear(format_datetime(NOON + HOUR, usegmt=True))

    assert abs(clocks.clock.now() - NOON - HOUR) <= 2 * SECOND


def test_time_advances_evenly_with_a_wrong_clock() -> None:
    clocks, seen = Clocks(HOUR), []
    for _ in range(200):
        clocks.answer(0.37)
        seen.append(clocks.clock.now())

    gaps = {round((after - before).total_seconds(), 2) for before, after in pairwise(seen)}
    assert gaps == {0.67}


@pytest.mark.parametrize("said", [None, "", "yesterday", "Sun, 99 Mar 2026 12:00:00 GMT"])
def test_own_time_counts_where_the_server_says_none(said: str | None) -> None:
    clocks = Clocks(HOUR)

    clocks.clock.hear(said)

    assert clocks.clock.now() == NOON + HOUR


class Dated(BaseHTTPRequestHandler):
    """A server whose clock is an hour ahead."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def date_time_string(self, timestamp: float | None = None) -> str:
        return format_datetime(datetime.now(UTC) + HOUR, usegmt=True)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  the base class names it
        """Silence."""


@pytest.fixture
def api(tmp_path: Path) -> Iterator[KubernetesApi]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Dated)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text(
        "{apiVersion: v1, kind: Config, current-context: c, contexts: [{name: c, context: {cluster: c, user: u}}], "
        f"users: [{{name: u, user: {{}}}}], clusters: [{{name: c, cluster: {{server: 'http://127.0.0.1:{server.server_port}'}}}}]}}"
    )
    yield KubernetesApi(ClusterAccount(str(kubeconfig)))
    server.shutdown()
    server.server_close()


def test_answers_of_the_api_server_tell_its_time(api: KubernetesApi) -> None:
    asyncio.run(api.call("GET", "/version"))

    assert abs(api.clock.now() - datetime.now(UTC) - HOUR) < 30 * SECOND


def test_the_operator_stamps_and_judges_by_the_servers_clock() -> None:
    memory, key = MemoryApi(), JobKey("space", "demo")
    memory.clock = Clocks(HOUR).clock
    memory.clock.hear(format_datetime(NOON, usegmt=True))
    engine = Engine(Settings(namespace="space"), cast("Any", memory), cast("Any", memory))
    engine._leader._renewed_at, engine._pods.filled = float("inf"), True
    bad = {**job_document("demo", replicas=3), "metadata": {"name": "demo", "namespace": "space"}}
    bad["spec"]["data"]["virtualShards"] = 7  # it fails at once
    engine.jobs.saw(memory.put(JOB, bad))

    asyncio.run(engine.reconciler.reconcile(key))

    assert abs(parse_timestamp(memory.objects[JOB]["status"]["completionTime"]) - NOON) <= 2 * SECOND
    [event] = [each for path, each in memory.objects.items() if "/events/" in path]
    assert abs(parse_timestamp(event["firstTimestamp"]) - NOON) <= 2 * SECOND


def test_progress_is_written_after_a_clock_was_ahead() -> None:
    cluster = running()
    report_progress(cluster, step=10)
    cluster.pass_time(3_600)
    cluster.reconcile_once()
    report_progress(cluster, step=20)
    cluster.pass_time(-3_600)

    cluster.reconcile_once()

    progress = status(cluster).progress
    assert progress is not None
    assert progress.step == 20
    assert not [each for each in reconcile(cluster.observe(), cluster.now) if isinstance(each, DeleteObject)]
