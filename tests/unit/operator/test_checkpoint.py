"""Requests for cuts, and the key from which their tokens are derived."""

import asyncio
import base64
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, cast

import pytest

from dlrm_api.names import Port
from dlrm_operator.api_client import ClusterRefusedError, ClusterUnavailableError, ConflictError, NotFoundError
from dlrm_operator.clients import checkpoint as module
from dlrm_operator.clients.checkpoint import KEY_OBJECT, CheckpointClient, ControlKey
from dlrm_operator.reconcile.state import CutAnswer, CutQuestion, JobKey, RequestCut
from dlrm_testing.operator.kubelet_double import ProgressServer
from dlrm_testing.operator.memory_api import MemoryApi

KEY = JobKey("space", "demo")
IP = "127.53.7.1"
TOKEN = "derived"


class Key:
    """Return a token, or why it cannot be derived."""

    def __init__(self, problem: Exception | None = None) -> None:
        self._problem = problem

    async def token(self, uid: str, attempt: int) -> str:
        assert (uid, attempt) == ("job-uid", 3)
        if self._problem is not None:
            raise self._problem
        return TOKEN


def cutter_of(key: Key, wake: Callable[[JobKey], None] = lambda key: None) -> CheckpointClient:
    return CheckpointClient(cast("ControlKey", key), wake)


@pytest.fixture
def pod() -> Iterator[ProgressServer]:
    server = ProgressServer(IP, Port.TRAINER)
    yield server
    server.shutdown()
    server.server_close()


def question(asked: str = "2026-01-01T00:00:00Z") -> RequestCut:
    about = CutQuestion(pod_uid="uid-1", asked=asked)
    return RequestCut(key=KEY, uid="job-uid", attempt=3, question=about, ip=IP, reason="Suspended")


def answer(problem: Exception | None = None, times: int = 1) -> tuple[CutAnswer, list[JobKey]]:
    """Return the answer to a request that is made ``times`` times, and the jobs that it woke."""

    async def ask() -> tuple[CutAnswer, list[JobKey]]:
        woken: list[JobKey] = []
        cutter = cutter_of(Key(problem), woken.append)
        for _ in range(times):
            cutter.request(question())
        while (found := cutter.answer(KEY)) is None:
            await asyncio.sleep(0.01)
        return found, woken

    return asyncio.run(asyncio.wait_for(ask(), 20))


def test_the_cut_is_asked_for_once_with_the_attempts_token(pod: ProgressServer) -> None:
    pod.cut_step = 51

    found, woken = answer(times=3)

    assert found == CutAnswer(question=question().question, step=51)
    assert pod.tokens == [TOKEN]
    assert woken == [KEY]


def test_a_refusal_is_reported_in_the_trainers_words(pod: ProgressServer) -> None:
    found, _ = answer()

    assert found.step is None
    assert found.problem == 'pod 0 answered 409: {"error": "no hand-off"}'


def test_a_pod_that_does_not_listen_is_reported() -> None:
    found, _ = answer()

    assert found.problem.startswith("pod 0 did not answer: ")
    assert TOKEN not in found.problem


@pytest.mark.parametrize(
    "problem",
    [
        ClusterUnavailableError("GET: 503 slow down"),
        ClusterRefusedError(403, 'secrets "dlrm-operator-control-key" is forbidden'),
    ],
)
def test_without_a_token_nobody_is_asked(pod: ProgressServer, problem: Exception) -> None:
    found, _ = answer(problem)

    assert found.problem == f"failed to read the control key: {problem}"
    assert pod.tokens == []


def test_a_refused_cut_is_forgotten_after_a_moment_and_a_given_one_is_not(
    pod: ProgressServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "RETRY_INTERVAL_S", 0.05)

    async def live() -> tuple[CutAnswer | None, CutAnswer | None]:
        cutter = cutter_of(Key())
        cutter.request(question())
        while cutter.answer(KEY) is None:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        forgotten, pod.cut_step = cutter.answer(KEY), 7
        cutter.request(question())
        while cutter.answer(KEY) is None:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        return forgotten, cutter.answer(KEY)

    forgotten, kept = asyncio.run(asyncio.wait_for(live(), 20))

    assert forgotten is None
    assert kept is not None
    assert kept.step == 7


def test_a_later_question_takes_the_place_of_one_at_work(pod: ProgressServer) -> None:
    pod.cut_step = 9

    async def live() -> CutAnswer:
        cutter = cutter_of(Key())
        cutter.request(question("earlier"))
        cutter.request(question("later"))
        while (found := cutter.answer(KEY)) is None:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        cutter.stop()
        return found

    assert asyncio.run(asyncio.wait_for(live(), 20)).question.asked == "later"


def test_a_pod_cannot_send_the_token_elsewhere(pod: ProgressServer) -> None:
    moved = f"HTTP/1.1 307 Moved\r\nLocation: http://{IP}:{Port.TRAINER}/cut\r\nContent-Length: 0\r\n\r\n"

    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(moved.encode())
        await writer.drain()
        writer.close()

    async def live() -> CutAnswer:
        server = await asyncio.start_server(serve, "127.53.7.2", Port.TRAINER)
        cutter = cutter_of(Key())
        cutter.request(replace(question(), ip="127.53.7.2"))
        while (found := cutter.answer(KEY)) is None:
            await asyncio.sleep(0.01)
        server.close()
        return found

    found = asyncio.run(asyncio.wait_for(live(), 20))

    assert found.problem.startswith("pod 0 answered 307")
    assert pod.tokens == []


SECRET = f"/api/v1/namespaces/operators/secrets/{KEY_OBJECT}"


def tokens(api: Any, *attempts: tuple[str, int]) -> list[str]:
    """Return the tokens of one process, all requested at once."""

    async def ask() -> list[str]:
        key = ControlKey(api, "operators")
        return await asyncio.gather(*(key.token(uid, attempt) for uid, attempt in attempts))

    return asyncio.run(ask())


def test_the_key_is_made_once_and_read_once() -> None:
    api = MemoryApi()

    tokens(api, ("uid", 1), ("uid", 2), ("other", 1))

    assert api.asked == [("GET", SECRET), ("POST", SECRET.rpartition("/")[0])]
    assert len(base64.b64decode(api.objects[SECRET]["data"]["key"])) == 32
    assert api.objects[SECRET]["immutable"]


def test_tokens_depend_on_job_and_attempt_only() -> None:
    api = MemoryApi()
    asked = [("uid", 1), ("uid", 2), ("uid", 12), ("uid1", 2)]

    first, second = tokens(api, *asked), tokens(api, *asked)

    assert first == second
    assert len(set(first)) == len(asked)


def test_a_gang_s_secret_is_derived_likewise_and_is_no_token() -> None:
    api, asked = MemoryApi(), [("uid", 1), ("uid", 2), ("uid", 12), ("uid1", 2)]

    async def secrets_of(key: ControlKey) -> list[str]:
        return [await key.gang_secret(uid, attempt) for uid, attempt in asked]

    first, second = (asyncio.run(secrets_of(ControlKey(api, "operators"))) for _ in range(2))

    assert first == second
    assert len({*first, *tokens(api, *asked)}) == 2 * len(asked)


def test_another_key_gives_other_tokens() -> None:
    assert tokens(MemoryApi(), ("uid", 1)) != tokens(MemoryApi(), ("uid", 1))


def test_concurrent_replicas_use_the_stored_key() -> None:
    api = MemoryApi()
    stored = tokens(api, ("uid", 1))

    class SeesItLate:
        """Says that there is no key, until it is refused to make one."""

        refused = False

        async def call(self, method: str, path: str, *rest: Any) -> Any:
            if method == "GET" and not self.refused:
                raise NotFoundError(404, "there is none")
            try:
                return await api.call(method, path, *rest)
            except ConflictError:
                self.refused = True
                raise

    assert tokens(SeesItLate(), ("uid", 1)) == stored


def test_a_key_that_could_not_be_had_is_asked_for_again() -> None:
    api = MemoryApi()

    class SilentOnce:
        silent = True

        async def call(self, *asked: Any) -> Any:
            if self.silent:
                self.silent = False
                raise ClusterUnavailableError("no answer")
            return await api.call(*asked)

    async def ask() -> str:
        key = ControlKey(SilentOnce(), "operators")  # type: ignore[arg-type]
        with pytest.raises(ClusterUnavailableError):
            await key.token("uid", 1)
        return await key.token("uid", 1)

    assert [asyncio.run(ask())] == tokens(api, ("uid", 1))


@pytest.mark.parametrize(
    "data",
    [{}, {"data": None}, {"data": {"key": "not base64"}}, {"data": {"key": base64.b64encode(b"short").decode()}}],
)
def test_a_secret_without_a_key_is_named_with_the_fix(data: dict[str, Any]) -> None:
    api = MemoryApi()
    api.put(SECRET, {"metadata": {"name": KEY_OBJECT}, **data})

    with pytest.raises(ClusterRefusedError, match=f"Secret operators/{KEY_OBJECT}, data.key"):
        tokens(api, ("uid", 1))
