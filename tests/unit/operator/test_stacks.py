"""How stacks of a gang are asked for: of every pod, and no pod can have the operator ask somebody else."""

import asyncio
import gzip
from collections.abc import Iterator

import pytest

from dlrm_api.names import Port
from dlrm_api.progress import TrainerPhase
from dlrm_operator.clients import pod_requests as module
from dlrm_operator.clients.pod_requests import StackClient, pod_url
from dlrm_operator.reconcile.state import JobKey, RequestStacks, StacksSeen, TrainingPosition
from dlrm_testing.operator.kubelet_double import ProgressServer

KEY = JobKey("space", "demo")
PLACE = TrainingPosition(pod_uid="uid-0", phase=TrainerPhase.TRAINING, step=7, evaluated_batches=0)
POD, SENDING_ON, SILENT = "127.53.8.1", "127.53.8.2", "127.53.8.3"

BOMB = gzip.compress(b"stacks" * 10_000)


@pytest.fixture
def pod() -> Iterator[ProgressServer]:
    server = ProgressServer(POD, Port.TRAINER)
    yield server
    server.shutdown()
    server.server_close()


async def send_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    location = pod_url(POD, Port.TRAINER, "/stacks")
    writer.write(f"HTTP/1.1 302 Found\r\nLocation: {location}\r\nContent-Length: 0\r\n\r\n".encode())
    await writer.drain()
    writer.close()


async def take(ips: dict[str, str]) -> StacksSeen:
    taker = StackClient(lambda key: None)
    taker.request(RequestStacks(key=KEY, place=PLACE, ips=ips))
    while (found := taker.answer(KEY)) is None:
        await asyncio.sleep(0.01)
    return found


def test_silent_pod_does_not_block_the_stacks_of_others(pod: ProgressServer) -> None:
    pod.stacks = "rank 0: in forward"

    found = asyncio.run(asyncio.wait_for(take({"demo-1-0": POD, "demo-1-1": SILENT}), 20))

    assert found.place == PLACE
    assert found.texts == {"demo-1-0": "rank 0: in forward", "demo-1-1": ""}


def test_a_pod_cannot_have_the_operator_read_another_address_into_its_log(pod: ProgressServer) -> None:
    pod.stacks = "what only this address may be asked for"

    async def live() -> StacksSeen:
        async with await asyncio.start_server(send_on, SENDING_ON, Port.TRAINER):
            return await take({"demo-1-0": SENDING_ON})

    assert asyncio.run(asyncio.wait_for(live(), 20)).texts == {"demo-1-0": ""}


def test_all_pods_of_a_gang_share_one_budget(pod: ProgressServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_JOB_BYTES", 1_000)
    pod.stacks = "x" * 300_000

    found = asyncio.run(asyncio.wait_for(take({f"demo-1-{i}": POD for i in range(4)}), 20))

    assert [len(text) for text in found.texts.values()] == [250] * 4


async def send_a_bomb(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(BOMB) + BOMB)
    await writer.drain()
    writer.close()


def test_answers_of_pods_are_not_inflated() -> None:
    async def live() -> StacksSeen:
        async with await asyncio.start_server(send_a_bomb, SENDING_ON, Port.TRAINER):
            return await take({"demo-1-0": SENDING_ON})

    assert len(asyncio.run(asyncio.wait_for(live(), 20)).texts["demo-1-0"]) <= len(BOMB)


@pytest.mark.parametrize(("ip", "host"), [("10.1.2.3", "10.1.2.3"), ("fd00::12", "[fd00::12]")])
def test_addresses_of_both_families_make_urls(ip: str, host: str) -> None:
    assert pod_url(ip, 9400, "/stacks") == f"http://{host}:9400/stacks"
