"""Ranks that die, stop or hang: the others end in time and name them, and nothing is left behind."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest

from dlrm_api.names import Env, ExitCode
from dlrm_testing.trainer.gangs import Pod, alive, job_document, plan_document, small_job
from dlrm_testing.trainer.peers import start_peers

SUPPORT = Path(__file__).parents[2] / "support"

pytestmark = pytest.mark.slow

TIMEOUT_S = 3
SAID_WITHIN_S = 10
"""Beyond the timeout: ranks wait for each other's answers, and for a store that may be gone."""
MakePods = Callable[..., list[Pod]]
DATA = {"format": "synthetic", "synthetic": {"samples": 4_000_000, "evalSamples": 500}}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Loops that are compiled the first time they run are, so that no rank waits longer than the timeout for that."""
    folder = tmp_path_factory.mktemp("compiled")
    changes: dict[str, Any] = {"training": {"maxSteps": 3}}
    plan = plan_document(small_job(folder, 2, **changes))
    pod = Pod(folder, job_document(folder, 2, **changes), plan, **{Env.HANDOFF_DIR: "", Env.LEDGER_DIR: ""})
    assert pod.run(checkpointer=False) == ExitCode.DONE, pod.log()


@pytest.fixture
def make_pods(tmp_path: Path, compiled: None) -> Iterator[MakePods]:
    """Pods of one rank each: every rank's last words are in its own log."""
    pods: list[Pod] = []

    def make(world_size: int, lost: int, **environment: str) -> list[Pod]:
        trainer = {"replicas": world_size, "processesPerReplica": 1, "threadsPerProcess": 1}
        changes: dict[str, Any] = {"data": DATA, "trainer": trainer}
        common = {
            Env.HANDOFF_DIR: "",
            Env.LEDGER_DIR: "",
            Env.COLLECTIVE_TIMEOUT_S: str(TIMEOUT_S),
            "PYTHONPATH": os.pathsep.join((str(SUPPORT), os.environ.get("PYTHONPATH", ""))),
            **environment,
        }
        for rank in range(world_size):
            folder = tmp_path / f"pod-{rank}"
            folder.mkdir()
            plan = plan_document(small_job(folder, world_size, **changes))
            pods.append(Pod(folder, job_document(folder, world_size, **changes), plan, **common))
            pods[-1].environment[Env.REPLICA] = str(rank)
            pods[-1].environment[Env.MASTER_PORT] = pods[0].environment[Env.MASTER_PORT]
            if "FAULT" in environment:
                pods[-1].module = "dlrm_testing.trainer.slow_trainer"
        pods[lost].constants["dlrm_trainer.distributed.failures.EXIT_TIMEOUT_S"] = 1.0
        for pod in pods:
            pod.start(checkpointer=False)
        pods[0].wait_for_step(2)
        return pods

    yield make
    for pod in pods:
        pod.close()


def messages_of_the_left(pods: list[Pod], lost: int) -> list[str]:
    """Return the messages of all pods but the lost one; all ended because a peer was lost."""
    left = [pod for rank, pod in enumerate(pods) if rank != lost]
    assert [pod.wait(60.0) for pod in left] == [ExitCode.TEMPORARY] * len(left)
    assert {pod.termination().reason for pod in left} == {"PeerLost"}
    return [pod.termination().message for pod in left]


@pytest.mark.parametrize(("world_size", "lost", "per_node"), [(2, 0, 1), (4, 2, 1), (4, 0, 2), (6, 4, 3)])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP, "hang"])
def test_a_lost_rank_is_named_alone_by_all_others_in_time(
    world_size: int, lost: int, per_node: int, how: signal.Signals | Literal["hang"]
) -> None:
    peers = start_peers(world_size, TIMEOUT_S, lost if how == "hang" else None, per_node)
    processes = [process for process, _ in peers]
    left = [pipe for rank, (_, pipe) in enumerate(peers) if rank != lost]
    start = time.monotonic()

    if how != "hang":
        os.kill(processes[lost].pid or 0, how)

    try:
        assert all(pipe.poll(30.0) for pipe in left)
        messages = [pipe.recv() for pipe in left]
        assert time.monotonic() - start < (0 if how == signal.SIGKILL else TIMEOUT_S) + SAID_WITHIN_S
        named = "hung: no collective" if how == "hang" else "died or stopped responding"
        for message in messages:
            assert re.match(rf"rank {lost} {named}", message), messages
        for rank, process in enumerate(processes):
            if rank != lost or how == "hang":
                process.join(30.0)
                assert process.exitcode == ExitCode.TEMPORARY
    finally:
        for process in processes:
            process.kill()
            process.join()


@pytest.mark.parametrize(
    ("lost", "collective", "made"),
    [(3, "all_to_all_single", 40), (0, "all_to_all_single", 41), (3, "all_reduce", 20)],
    ids=["before its sizes", "before its message", "before its sum"],
)
def test_a_rank_killed_in_a_phase_of_an_exchange_is_named_at_once(lost: int, collective: str, made: int) -> None:
    peers = start_peers(4, 10 * TIMEOUT_S, None, per_node=2, dies=(lost, collective, made))
    peers[lost][0].join(30.0)
    start = time.monotonic()

    try:
        for rank, (process, pipe) in enumerate(peers):
            if rank != lost:
                assert pipe.poll(30.0)
                assert re.match(rf"rank {lost} died or stopped responding", pipe.recv())
                process.join(30.0)
                assert process.exitcode == ExitCode.TEMPORARY
        assert time.monotonic() - start < SAID_WITHIN_S
    finally:
        for process, _ in peers:
            process.kill()
            process.join()


def test_a_rank_that_hangs_in_its_reader_is_named_and_ends_itself(make_pods: MakePods) -> None:
    lost = 1
    pods = make_pods(2, lost, FAULT=f"{lost} read 20 3600")
    ranks = [pod.rank_pids()[0] for pod in pods]

    messages = messages_of_the_left(pods, lost)

    for message in messages:
        assert re.match(rf"rank {lost} hung: no collective for \d s", message), messages
    assert pods[lost].wait(30.0) == ExitCode.TEMPORARY
    assert pods[lost].termination().reason == "Hung"
    assert "slow_batch" in pods[lost].log()
    assert not any(map(alive, ranks))


def test_an_error_in_the_thread_that_sends_ids_ends_its_rank_and_is_named(make_pods: MakePods) -> None:
    lost = 1
    pods = make_pods(2, lost, FAULT=f"{lost} send 30 0")

    messages = messages_of_the_left(pods, lost)

    for message in messages:
        assert message.startswith(f"rank {lost} "), messages
    assert pods[lost].wait(30.0) == ExitCode.INTERNAL
    assert "planted in the thread that sends ids" in pods[lost].termination().message


def test_a_launcher_leaves_no_rank_behind_and_blames_the_one_that_stopped(tmp_path: Path, compiled: None) -> None:
    environment = {Env.HANDOFF_DIR: "", Env.LEDGER_DIR: "", Env.COLLECTIVE_TIMEOUT_S: str(TIMEOUT_S)}
    plan = plan_document(small_job(tmp_path, 2, data=DATA))
    pod = Pod(tmp_path, job_document(tmp_path, 2, data=DATA), plan, **environment)
    pod.constants["dlrm_trainer.launcher.PEER_EXIT_TIMEOUT_S"] = 2.0
    pod.start(checkpointer=False)
    pod.wait_for_step(2)
    ranks = pod.rank_pids()

    os.kill(ranks[1], signal.SIGSTOP)

    assert pod.wait(180.0) == ExitCode.TEMPORARY
    assert pod.termination().message.startswith("rank 1 died or stopped responding (")
    assert not any(map(alive, ranks))
