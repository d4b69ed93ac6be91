"""Ranks of several nodes: what they exchange is the same as in one level, over fewer connections."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from benchmarks.scale_ranks import MAX_MEETING_S, meet
from pydantic import TypeAdapter

from dlrm_api.errors import TemporaryError
from dlrm_api.names import Env, ExitCode
from dlrm_testing.trainer.gangs import Pod, job_document, plan_document, run_ranks, small_job
from dlrm_trainer.distributed.collectives import Collectives

pytestmark = pytest.mark.slow

SIZES = 0, 3, 1, 5, 700, 0, 9_000


def exchange(collectives: Collectives, kinds: list[str]) -> list[Any]:
    """Make every collective of hosts, with messages of changing sizes, several in flight; what came."""
    import torch

    ranks = torch.arange(collectives.world_size)
    arriving = []
    for step, kind in enumerate(kinds * 3):
        table = torch.tensor(SIZES)[(ranks[:, None] * 5 + ranks * 3 + step) % len(SIZES)]
        sent, received = table[collectives.rank].tolist(), table[:, collectives.rank].tolist()
        message = (torch.arange(sum(sent)) + 10_000 * collectives.rank).to(getattr(torch, kind))
        arriving.append(collectives.start_all_to_all("ids", message, sent, received))
    sums = torch.arange(1_000.0) / (3 + collectives.rank)
    collectives.all_reduce(sums)
    values = TypeAdapter(list[int])
    return [
        [each.wait().numpy().tobytes() for each in arriving],
        sums.numpy().tobytes(),
        collectives.broadcast([5, 6] if collectives.rank == 0 else None, values),
        collectives.gather([collectives.rank], values),
        collectives.scatter([[7] * rank for rank in ranks.tolist()] if collectives.rank == 0 else None, values),
    ]


def test_every_layout_of_nodes_exchanges_the_same_bits() -> None:
    kinds = ["int64", "float32", "uint8"]

    found = [run_ranks(6, exchange, kinds, per_node=per_node) for per_node in (1, 2, 3, 6)]

    assert all(each == found[0] for each in found)
    assert all(gathered == [[0], [1], [2], [3], [4], [5]] for *_, gathered, _ in found[0])
    assert [scattered for *_, scattered in found[0]] == [[7] * rank for rank in range(6)]


def damage(collectives: Collectives, size: int) -> str:
    """Exchange where one rank of each node tells the others a size that cannot be; what is said of it."""
    import torch
    import torch.distributed as dist

    call = dist.all_to_all_single

    def spoil(output: torch.Tensor, message: torch.Tensor, *rest: Any, **named: Any) -> Any:
        # Messages between nodes have the sizes of their parts.
        if not rest:
            message[:, 1, -1] = size
        return call(output, message, *rest, **named)

    if collectives.rank % 2:
        dist.all_to_all_single = spoil
    ones = [1] * collectives.world_size
    try:
        collectives.all_to_all("ids", torch.ones(collectives.world_size), ones, ones)
    except TemporaryError as error:
        return str(error)
    finally:
        dist.all_to_all_single = call
    return ""


@pytest.mark.parametrize("size", [-1, 17, 2**40, 2**63 - 1])
def test_sizes_that_cannot_be_are_refused_by_the_rank_that_got_them(size: int) -> None:
    said = run_ranks(4, damage, size, per_node=2)

    for rank, words in enumerate(said):
        assert words.startswith(f"rank {rank // 2 * 2 + 1} sent sizes")


def test_32_ranks_on_4_nodes_meet_soon_over_few_connections() -> None:
    seen = meet(4, 8)

    assert max(each.seconds for each in seen) < MAX_MEETING_S
    assert 0 < max(each.sockets for each in seen) <= 2 * (4 + 8)


def train(folder: Path, nodes: int) -> tuple[list[float], str]:
    """Train four ranks on so many nodes, a pod each; return the losses and the digest of the last state."""
    changes: dict[str, Any] = {
        "trainer": {"replicas": nodes, "processesPerReplica": 4 // nodes, "threadsPerProcess": 1},
        "training": {"maxSteps": 12},
    }
    pods: list[Pod] = []
    for replica in range(nodes):
        own = folder / f"{nodes}-{replica}"
        plan = plan_document(small_job(own, **changes))
        pods.append(Pod(own, job_document(own, **changes), plan, **{Env.HANDOFF_DIR: "", Env.LEDGER_DIR: ""}))
        pods[-1].environment |= {Env.REPLICA: str(replica), Env.MASTER_PORT: pods[0].environment[Env.MASTER_PORT]}
    for pod in pods:
        pod.start(checkpointer=False)
    assert [pod.wait() for pod in pods] == [ExitCode.DONE] * nodes, pods[0].log()
    return [line["loss"] for line in pods[0].lines()], pods[0].result()["state_digest"]


def test_losses_and_state_do_not_depend_on_the_layout_of_nodes(tmp_path: Path) -> None:
    found = [train(tmp_path, nodes) for nodes in (1, 2, 4)]

    assert len(found[0][0]) == 12
    assert found == [found[0]] * 3
