"""The webhook's endpoint: TLS with a certificate that is rotated while requests go on, and what it answers to noise."""

import asyncio
import io
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from dlrm_api.errors import BadDataError, NoInputError
from dlrm_cluster.ports import free_port
from dlrm_operator.webhook import server as server_module
from dlrm_operator.webhook.server import (
    MAX_BODY_BYTES,
    MAX_BODY_BYTES_IN_FLIGHT,
    Certificate,
    ReviewHandler,
    WebhookServer,
)
from dlrm_testing.operator.mounted_secret import MountedSecret

Work = Callable[[str], Awaitable[None]]


class Echo:
    async def answer(self, document: Any) -> dict[str, Any]:
        if "noise" in document:
            raise BadDataError("no AdmissionReview of a DLRMJob")
        return {"said": document}

    async def start(self) -> None:
        """Nothing runs."""

    async def stop(self) -> None:
        """Nothing runs."""


def serve(secret: MountedSecret, work: Work, answering: ReviewHandler | None = None, wait_s: float = 20.0) -> None:
    async def run() -> None:
        port = free_port("127.0.0.1")
        certificate = Certificate(secret.folder)
        server = WebhookServer(
            "127.0.0.1", port, answering or Echo(), certificate, wait_s=wait_s, reload_interval_s=0.02
        )
        await server.start()
        try:
            await work(f"https://127.0.0.1:{port}/validate")
        finally:
            await server.stop()

    asyncio.run(run())


async def post(url: str, ca: Path, body: str = '{"a": 1}') -> tuple[int, str]:
    context = ssl.create_default_context(cafile=ca)
    connector = aiohttp.TCPConnector(ssl=context, force_close=True)
    async with (
        aiohttp.ClientSession(connector=connector) as session,
        session.post(url, data=io.BytesIO(body.encode())) as response,
    ):
        return response.status, await response.text()


async def until(truth: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(20):
        while not await truth():
            await asyncio.sleep(0.01)


async def accepts(url: str, ca: Path) -> bool:
    try:
        await post(url, ca)
    except aiohttp.ClientConnectorCertificateError:
        return False
    return True


def test_rotated_certificate_fails_no_request(tmp_path: Path) -> None:
    secret = MountedSecret(tmp_path / "certs")

    async def work(url: str) -> None:
        bundle = (
            tmp_path / "bundle.crt"
        )  # who calls trusts the old authority and the new one, as while cert-manager rotates
        first, answered, over = secret.ca, 0, asyncio.Event()
        bundle.write_bytes(first.read_bytes())

        async def keep_asking() -> int:
            nonlocal answered
            while not over.is_set():
                status, _ = await post(url, bundle)
                assert status == 200
                answered += 1
            return answered

        asking = asyncio.create_task(keep_asking())
        for _ in range(5):
            fresh = secret.make()
            bundle.write_bytes(bundle.read_bytes() + fresh.ca.read_bytes())
            await asyncio.sleep(0.05)  # a context that was made before lacks the new authority
            secret.show(fresh.server_cert, fresh.server_key)
            await until(lambda ca=fresh.ca: accepts(url, ca))
        over.set()

        assert await asking > 5
        assert not await accepts(url, first)

    serve(secret, work)


def test_a_server_name_makes_no_difference(tmp_path: Path) -> None:
    secret = MountedSecret(tmp_path / "certs")

    async def work(url: str) -> None:
        named = url.replace("127.0.0.1", "localhost")
        fresh = secret.rotate()
        await until(lambda: accepts(url, fresh))

        assert await accepts(named, fresh)

    serve(secret, work)


def test_a_pair_that_does_not_fit_leaves_the_old_one_in_use(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    secret = MountedSecret(tmp_path / "certs")
    first = secret.ca

    async def work(url: str) -> None:
        secret.mismatch()
        await until(lambda: asyncio.sleep(0, "failed to reload webhook certificate" in caplog.text))
        still = await accepts(url, first)
        fresh = secret.rotate()
        await until(lambda: accepts(url, fresh))

        assert still

    serve(secret, work)


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ('{"a": 1}', 200, '{"said": {"a": 1}}'),
        ('{"noise": 1}', 400, "no AdmissionReview of a DLRMJob"),
        ("{", 400, "Expecting property name"),
        ("[" * 200_000, 400, "recursion"),
        ("9" * 10_000, 400, "digits"),
        (f'{{"noise": "{"x" * 10_000}"}}', 400, "no AdmissionReview of a DLRMJob"),
        ("x" * (MAX_BODY_BYTES + 1), 413, "exceeded"),
    ],
    ids=["review", "another object", "no JSON", "too deep", "too many digits", "long", "too large"],
)
def test_noise_is_reported(tmp_path: Path, body: str, status: int, words: str) -> None:
    secret = MountedSecret(tmp_path / "certs")

    async def work(url: str) -> None:
        found = await post(url, secret.ca, body)

        assert found[0] == status
        assert words in found[1]

    serve(secret, work)


class Slow(Echo):
    """Answers when it is let."""

    def __init__(self) -> None:
        self.at_work, self.most_at_work, self.let = 0, 0, asyncio.Event()

    async def answer(self, document: Any) -> dict[str, Any]:
        self.at_work += 1
        self.most_at_work = max(self.most_at_work, self.at_work)
        await self.let.wait()
        self.at_work -= 1
        return {}


LARGE = '{"a": "' + "x" * (MAX_BODY_BYTES - 100) + '"}'


def test_bytes_of_reviews_in_flight_are_bounded(tmp_path: Path) -> None:
    secret, slow = MountedSecret(tmp_path / "certs"), Slow()

    async def work(url: str) -> None:
        asked = [asyncio.create_task(post(url, secret.ca, LARGE)) for _ in range(6)]
        await until(lambda: asyncio.sleep(0, slow.at_work == MAX_BODY_BYTES_IN_FLIGHT // MAX_BODY_BYTES))
        slow.let.set()

        assert [status for status, _ in await asyncio.gather(*asked)] == [200] * 6
        assert slow.most_at_work == 2

    serve(secret, work, slow)


def test_review_that_waits_too_long_gets_503(tmp_path: Path) -> None:
    secret, slow = MountedSecret(tmp_path / "certs"), Slow()

    async def work(url: str) -> None:
        held = [asyncio.create_task(post(url, secret.ca, LARGE)) for _ in range(2)]
        await until(lambda: asyncio.sleep(0, slow.at_work == 2))
        status, words = await post(url, secret.ca, LARGE)
        slow.let.set()

        assert (status, words) == (503, "too many reviews in flight: try again")
        assert [status for status, _ in await asyncio.gather(*held)] == [200, 200]
        assert (await post(url, secret.ca, LARGE))[0] == 200

    serve(secret, work, slow, wait_s=0.2)


@pytest.mark.slow
def test_a_review_that_does_not_arrive_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = MountedSecret(tmp_path / "certs")
    monkeypatch.setattr(server_module, "BODY_TIMEOUT_S", 0.1)

    async def work(url: str) -> None:
        context = ssl.create_default_context(cafile=secret.ca)
        port = int(url.split(":")[2].split("/")[0])
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
        writer.write(b"POST /validate HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{")
        line = await asyncio.wait_for(reader.readline(), 20)
        writer.close()

        assert b" 408 " in line

    serve(secret, work)


def test_a_folder_without_a_key_pair_is_refused_with_the_fix(tmp_path: Path) -> None:
    with pytest.raises(NoInputError, match=r"tls\.crt and tls\.key"):
        Certificate(tmp_path)
