"""How the operator asks a pod for a cut: with its attempt's token, beside the turns; and its words when that fails."""

import asyncio
import base64
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import pytest
from kubelet_double import ProgressServer

from dlrm_api.names import Port
from dlrm_operator.beside import cuts
from dlrm_operator.beside.cuts import Cutter
from dlrm_operator.cluster import Api
from dlrm_operator.cluster_errors import ClusterUnavailableError, NotFoundError
from dlrm_operator.facts.actions import RequestCut
from dlrm_operator.facts.observed import CutAnswer, CutQuestion, JobKey

Object = dict[str, Any]
KEY = JobKey("space", "demo")
IP = "127.53.7.1"
TOKEN = base64.b64encode(b"drawn-by-chance").decode()


class Secrets:
    """One Secret, or why it can't be read."""

    def __init__(self, data: Object | Exception) -> None:
        self._data = data

    async def call(self, method: str, path: str) -> Object:
        assert (method, path) == ("GET", "/api/v1/namespaces/space/secrets/demo-token-1")
        if isinstance(self._data, Exception):
            raise self._data
        return {"data": self._data}


@pytest.fixture
def pod() -> Iterator[ProgressServer]:
    server = ProgressServer(IP, Port.TRAINER)
    yield server
    server.shutdown()
    server.server_close()


def question(asked: str = "2026-01-01T00:00:00Z") -> RequestCut:
    about = CutQuestion(pod_uid="uid-1", asked=asked)
    return RequestCut(key=KEY, question=about, ip=IP, secret="demo-token-1", reason="Suspended")


def answer(secret: Object | Exception, times: int = 1) -> tuple[CutAnswer, list[JobKey]]:
    """What comes of a request that is made ``times`` times, and whom it woke."""

    async def ask() -> tuple[CutAnswer, list[JobKey]]:
        woken: list[JobKey] = []
        cutter = Cutter(cast("Api", Secrets(secret)), woken.append)
        for _ in range(times):
            cutter.request(question())
        while (found := cutter.answer(KEY)) is None:
            await asyncio.sleep(0.01)
        return found, woken

    return asyncio.run(asyncio.wait_for(ask(), 20))


def test_the_cut_is_asked_for_once_with_the_attempts_token(pod: ProgressServer) -> None:
    pod.cut_step = 51

    found, woken = answer({"token": TOKEN}, times=3)

    assert found == CutAnswer(question=question().question, step=51)
    assert pod.tokens == ["drawn-by-chance"]
    assert woken == [KEY]


def test_a_refusal_is_told_in_the_trainers_words(pod: ProgressServer) -> None:
    found, _ = answer({"token": TOKEN})

    assert found.step is None
    assert found.problem == 'pod 0 answered 409: {"error": "no hand-off"}'


def test_a_pod_that_does_not_listen_is_told() -> None:
    found, _ = answer({"token": TOKEN})

    assert found.problem.startswith("pod 0 did not answer: ")
    assert "drawn-by-chance" not in found.problem


@pytest.mark.parametrize(
    ("secret", "words"),
    [
        (
            NotFoundError(404, 'secrets "demo-token-1" not found'),
            'Secret demo-token-1: secrets "demo-token-1" not found',
        ),
        (ClusterUnavailableError("GET: 503 slow down"), "Secret demo-token-1: GET: 503 slow down"),
        ({}, "Secret demo-token-1 holds no token"),
        ({"token": "not base64"}, "Secret demo-token-1 holds no token"),
        ({"token": base64.b64encode(b"two\nlines").decode()}, "Secret demo-token-1 holds no token"),
    ],
)
def test_without_a_token_nobody_is_asked(pod: ProgressServer, secret: Object | Exception, words: str) -> None:
    found, _ = answer(secret)

    assert found.problem == words
    assert pod.tokens == []


def test_a_refused_cut_is_forgotten_after_a_moment_and_a_given_one_is_not(
    pod: ProgressServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuts, "AGAIN_S", 0.05)

    async def live() -> tuple[CutAnswer | None, CutAnswer | None]:
        cutter = Cutter(cast("Api", Secrets({"token": TOKEN})), lambda key: None)
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
        cutter = Cutter(cast("Api", Secrets({"token": TOKEN})), lambda key: None)
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
        cutter = Cutter(cast("Api", Secrets({"token": TOKEN})), lambda key: None)
        cutter.request(replace(question(), ip="127.53.7.2"))
        while (found := cutter.answer(KEY)) is None:
            await asyncio.sleep(0.01)
        server.close()
        return found

    found = asyncio.run(asyncio.wait_for(live(), 20))

    assert found.problem.startswith("pod 0 answered 307")
    assert pod.tokens == []
