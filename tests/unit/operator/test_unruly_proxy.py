"""The unruly proxy does what its weather says, and nothing else: otherwise schedules in faults would prove nothing."""

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from yarl import URL

from dlrm_testing.operator.unruly_proxy import Fault, UnrulyProxy, WatchFault, Weather

PODS = "/api/v1/namespaces/space/pods"
PATIENCE_S = 30.0
Answer = tuple[int, str]


class Upstream:
    """An API server of one list, which remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.url = ""

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        self.asked.append(f"{request.method} {request.raw_path} {(await request.read()).decode()}".strip())
        if "watch" not in request.query:
            return web.json_response({"items": [], "said": "x" * 100})
        answer = web.StreamResponse()
        await answer.prepare(request)
        for number in range(120):
            await answer.write(json.dumps({"type": "ADDED", "object": {"number": number}}).encode() + b"\n")
            await asyncio.sleep(0.05)
        return answer


def through(
    weather: Weather, do: Callable[[str, UnrulyProxy], Awaitable[Any]], upstream: Upstream | None = None
) -> tuple[Any, Upstream, UnrulyProxy]:
    """Return the result of ``do`` behind a proxy in this weather."""
    upstream = upstream or Upstream()

    async def run() -> tuple[Any, Upstream, UnrulyProxy]:
        runner = web.ServerRunner(web.Server(upstream.handle), shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        proxy = UnrulyProxy(f"http://127.0.0.1:{runner.addresses[0][1]}", weather={"space": weather})
        async with proxy.serve():
            found = await do(proxy.url, proxy)
        await runner.cleanup()
        return found, upstream, proxy

    return asyncio.run(run())


async def ask(url: str, method: str = "GET", path: str = PODS, body: str = "") -> Answer | str:
    """Status and body of one answer; a word where there was none, however slow the machine is."""
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=PATIENCE_S)) as session,
            session.request(method, URL(url + path, encoded=True), data=body) as answer,
        ):
            return answer.status, await answer.text()
    except TimeoutError:
        return "silence"
    except aiohttp.ClientError:
        return "broken"


def one(fault: Fault, done: int) -> tuple[Any, list[str]]:
    """The answer to one write that meets this fault, and what reached the server, which is to be ``done`` writes."""
    upstream = Upstream()

    async def do(url: str, proxy: UnrulyProxy) -> Answer | str:
        found = await ask(url, "POST", "/api/v1/namespaces/space/events", "{}")
        async with asyncio.timeout(PATIENCE_S):
            while len(upstream.asked) < done:
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.3)  # for what is not to come
        return found

    weather = Weather(seed=1, rate=1.0, max_delay_s=0.2, only=(fault,))
    found, _, proxy = through(weather, do, upstream)
    assert set(proxy.faults) == {fault}
    return found, upstream.asked


@pytest.mark.parametrize(
    ("fault", "answered", "done"),
    [
        (Fault.DROPPED, "broken", 0),
        (Fault.ANSWER_LOST, "broken", 1),
        (Fault.TORN, "broken", 1),
        (Fault.LATE, "broken", 1),
        (Fault.DOUBLED, 200, 2),
        (Fault.DELAYED, 200, 1),
    ],
)
def test_a_write_meets_its_fault(fault: Fault, answered: str | int, done: int) -> None:
    answer, asked = one(fault, done)

    assert answer == answered if isinstance(answered, str) else answer[0] == answered
    assert asked == ["POST /api/v1/namespaces/space/events {}"] * done


def test_a_refusal_is_one_that_an_api_server_gives_and_nothing_is_done() -> None:
    async def do(url: str, proxy: UnrulyProxy) -> Counter[int]:
        return Counter([(await ask(url, "POST", f"{PODS}/{number}"))[0] for number in range(60)])

    codes, upstream, _ = through(Weather(seed=1, rate=1.0, only=(Fault.REFUSED,)), do)

    assert set(codes) == {409, 429, 500, 503}
    assert upstream.asked == []


def test_a_half_open_connection_never_answers_until_the_weather_is_calm() -> None:
    async def do(url: str, proxy: UnrulyProxy) -> list[Answer | str]:
        held = asyncio.create_task(ask(url, "POST"))
        while not proxy.faults[Fault.HALF_OPEN]:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.3)
        silent = not held.done()
        proxy.calm("space")
        return ["silence" if silent else "answered", await held]

    answers, upstream, _ = through(Weather(seed=1, rate=1.0, half_open=1.0), do)

    assert answers == ["silence", "broken"]
    assert upstream.asked == []


def test_a_pod_is_never_created_late() -> None:
    async def do(url: str, proxy: UnrulyProxy) -> None:
        for _ in range(30):
            await ask(url, "POST", PODS)

    _, _, proxy = through(Weather(seed=1, rate=1.0, only=(Fault.LATE,)), do)

    assert proxy.faults == Counter()


def test_calm_weather_changes_nothing_and_other_namespaces_have_none() -> None:
    async def do(url: str, proxy: UnrulyProxy) -> list[Answer | str]:
        elsewhere = [await ask(url, path="/api/v1/namespaces/other/pods?limit=5&a=b%2Fc") for _ in range(5)]
        proxy.calm("space")
        return [*elsewhere, *[await ask(url, "POST", body="body") for _ in range(5)]]

    answers, upstream, proxy = through(Weather(seed=1, rate=1.0), do)

    assert {answer[0] for answer in answers} == {200}
    assert upstream.asked == [*["GET /api/v1/namespaces/other/pods?limit=5&a=b%2Fc"] * 5, *[f"POST {PODS} body"] * 5]
    assert proxy.faults == Counter()


@pytest.mark.slow
def test_each_fault_of_a_watch_is_one_that_a_client_can_meet() -> None:
    async def watch(url: str) -> tuple[int, str]:
        """Lines said twice, and how the watch ended."""
        lines: list[bytes] = []
        try:
            timeout = aiohttp.ClientTimeout(sock_read=2.5)  # a busy machine is silent for a second
            async with (
                aiohttp.ClientSession(timeout=timeout) as session,
                session.get(f"{url}{PODS}?watch=true") as answer,
            ):
                async for line in answer.content:
                    lines.append(line)
            end = "410" if json.loads(lines[-1])["type"] == "ERROR" else "ended"
        except TimeoutError:
            end = "silent"
        except aiohttp.ClientError:
            end = "broken"
        whole = [line for line in lines if line.endswith(b"\n")]
        numbers = [json.loads(line)["object"].get("number") for line in whole]
        return len(numbers) - len(set(numbers)), end

    async def do(url: str, proxy: UnrulyProxy) -> list[tuple[int, str]]:
        return list(await asyncio.gather(*(watch(url) for _ in range(30))))

    weather = Weather(seed=3, rate=1.0, watch_life_s=(0.1, 0.2), silence_s=(3.5, 4.0), max_delay_s=0.1)
    found, _, proxy = through(weather, do)

    assert set(proxy.faults) == set(WatchFault)
    assert {end for _, end in found} == {"410", "silent", "broken"}
    assert any(doubled for doubled, _ in found)


def test_the_same_seed_gives_the_same_weather() -> None:
    kinds = [("GET", PODS), ("POST", PODS), ("PATCH", f"{PODS}/a")]

    def faults(seed: int) -> list[Fault | None]:
        weather = Weather(seed=seed, rate=0.3)
        return [weather.request(*kind, number)[0] for kind in kinds for number in range(40)]

    assert faults(5) == faults(5)
    assert faults(5) != faults(6)
    assert 10 < sum(fault is not None for fault in faults(5)) < 70
