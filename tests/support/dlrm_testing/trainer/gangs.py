"""Small jobs, plans for them by hand, and gangs of real processes that meet over gloo."""

from __future__ import annotations

import atexit
import json
import os
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

from dlrm_api.job import DLRMJob, parse_job
from dlrm_api.names import Env
from dlrm_api.plan import Plan, parse_plan
from dlrm_api.progress import TerminationMessage
from dlrm_cluster.ports import LOOPBACK, free_port
from dlrm_testing.programs import fork_context, run_module

PRELOADED = [
    *("dlrm_trainer.launcher", "dlrm_checkpointer.sidecar", "hypothesis.strategies", "dlrm_testing.kernels.loaded"),
    "torch.distributed.tensor",  # imported by the first module that moves to a device, in 0.6 to 1.5 s
    *(f"dlrm_testing.trainer.{name}" for name in ("cutting", "reference", "sharded_runs", "shardings", "stacked")),
    # imported by the first call of a compiled function
    *("numba.np.arraymath", "numba.np.npyimpl", "numba.np.random.generator_methods", "numba.typed.typedlist"),
    *("numba.typed.typeddict", "numba.typed.typedset", "numba.misc.cffiimpl", "numba.experimental.function_type"),
]
"""Nothing that looks for a GPU: processes forked after that could not use it."""


def job_document(folder: Path, world_size: int = 1, **changes: Any) -> dict[str, Any]:
    """Return a small synthetic job; ``changes`` are merged into the sections of its spec."""
    tables = [
        {"name": "users", "rows": 900, "dim": 8},
        {"name": "bags", "rows": 120, "dim": 8, "pooling": "mean", "maxLookups": 4, "avgLookups": 2},
        {"name": "small", "rows": 30, "dim": 8},
        {"name": "items", "rows": 400, "dim": 8, "maxLookups": 3},
    ]
    spec: dict[str, Any] = {
        "model": {"denseFeatures": ["a", "b"], "bottomMlp": [16, 8], "topMlp": [16, 1], "tables": tables},
        "data": {
            "format": "synthetic",
            "synthetic": {"samples": 4_000, "evalSamples": 500},
            "globalBatchSize": 64,
            "virtualShards": 8,
        },
        "training": {"rowOptimizer": {"learningRate": 0.05}, "denseOptimizer": {"learningRate": 0.02}, "seed": 3},
        "trainer": {"processesPerReplica": world_size, "threadsPerProcess": 1},
        "checkpoint": {"uri": f"file://{folder}/store", "intervalSteps": 10},
    }
    for section, values in changes.items():
        spec[section] = spec[section] | values
    return {"metadata": {"name": "small"}, "spec": spec}


def small_job(folder: Path, world_size: int = 1, **changes: Any) -> DLRMJob:
    """``job_document`` as a job."""
    return parse_job(job_document(folder, world_size, **changes))


def plan_document(job: DLRMJob, owners: Sequence[int | None] | None = None) -> dict[str, Any]:
    """Plan by hand: each table's owner, None for data-parallel; by default in turn, ``small`` data-parallel."""
    world_size, tables = job.spec.world_size, job.spec.model.all_tables()
    if owners is None:
        owners = [None if table.name == "small" else number % world_size for number, table in enumerate(tables)]
    entries = []
    for table, owner in zip(tables, owners, strict=True):
        extent = {"rowStart": 0, "rowEnd": table.rows, "columnStart": 0, "columnEnd": table.dim}
        where = {"rank": 0, "kind": "data"} if owner is None else {"rank": owner, "kind": "table"}
        entries.append({"name": table.name, "columnBlocks": list(table.block_edges), "ranges": [where | extent]})
    processes = job.spec.trainer.processes_per_replica
    ranks_plan = [{"rank": rank, "node": rank // processes, "bytesPerTier": {}} for rank in range(world_size)]
    return {
        "worldSize": world_size,
        "processesPerNode": processes,
        "ranks": ranks_plan,
        "tables": entries,
        "handoffBytes": [2**26] * job.spec.replicas,
    }


def hand_plan(job: DLRMJob, owners: Sequence[int | None] | None = None) -> Plan:
    """``plan_document`` as a plan."""
    return parse_plan(json.dumps(plan_document(job, owners)))


def gang_context() -> ForkServerContext:
    """Return the context of processes that have loaded all that tests of gangs need, once for all gangs."""
    return fork_context(PRELOADED)


def run_ranks(
    world_size: int,
    function: Callable[..., Any],
    *arguments: Any,
    host: str = LOOPBACK,
    bind: str = LOOPBACK,
    timeout_s: float = 60.0,
    per_node: int = 1,
) -> list[Any]:
    """Run ``function(collectives, *arguments)`` on every rank of a gang of processes; what each returned.

    Rank 0 serves the store on ``bind``, and the others reach it at ``host``. Collectives wait for ``timeout_s``.
    ``per_node`` ranks in a row are on one node.
    """
    context, port = gang_context(), free_port()
    pipes, processes = [], []
    for rank in range(world_size):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(
            target=_rank, args=(rank, world_size, (host, port, bind), per_node, timeout_s, sender, function, arguments)
        )
        process.start()
        sender.close()
        pipes.append(receiver)
        processes.append(process)
    try:
        results = [pipe.recv() for pipe in pipes]
    finally:
        for process in processes:
            process.join(20)
            process.kill()
    assert all(process.exitcode == 0 for process in processes)
    return results


def _rank(
    rank: int,
    world_size: int,
    store: tuple[str, int, str],
    per_node: int,
    timeout_s: float,
    sender: Connection,
    function: Callable[..., Any],
    arguments: Any,
) -> None:
    import torch

    from dlrm_trainer.distributed.rendezvous import RankGroup

    torch.set_num_threads(1)
    gang = RankGroup(rank, world_size, *store, per_node=per_node)
    gang.meet(60.0, timeout_s, lambda: None)
    sender.send(function(gang.collectives, *arguments))
    gang.collectives.barrier()
    os._exit(0)


class Pod:
    """One launcher and, where wanted, its checkpointer: real processes over one folder.

    Their programs run as by ``python -m``, in processes forked where torch and numba are loaded: that takes seconds.
    """

    def __init__(self, folder: Path, job: dict[str, Any], plan: dict[str, Any], **environment: str) -> None:
        self.folder, self.work = folder, folder / "work"
        self.work.mkdir(parents=True, exist_ok=True)
        (folder / "job.json").write_text(json.dumps(job))
        (folder / "plan.json").write_text(json.dumps(plan))
        self.port = free_port()
        self.environment = {
            Env.BIND: LOOPBACK,
            Env.MASTER_PORT: str(free_port()),
            Env.TRAINER_PORT: str(self.port),
            Env.CHECKPOINTER_PORT: str(free_port()),
            Env.HANDOFF_DIR: str(folder / "handoff"),
            Env.WORK_DIR: str(self.work),
            Env.LEDGER_DIR: str(folder / "ledger"),
            Env.GRACE_S: "60",
            "OMP_NUM_THREADS": "1",
            **environment,
        }
        self.module = "dlrm_trainer"
        self.constants: dict[str, float] = {}
        """Values of modules' constants, in all processes of the pod: time-outs that are shorter in a test."""
        self.launcher: ForkServerProcess | None = None
        self.checkpointer: ForkServerProcess | None = None
        atexit.register(self.close)  # before multiprocessing waits for its processes

    def start(self, *, checkpointer: bool = True) -> None:
        """Start both."""
        (self.folder / "trainer-termination.json").unlink(missing_ok=True)
        if checkpointer:
            self.start_checkpointer()
        self.launcher = self._open(self.module, "trainer.log", "--plan", str(self.folder / "plan.json"), "--digest")

    def start_checkpointer(self) -> None:
        """Start the checkpointer alone: the one before it has ended."""
        self.checkpointer = self._open("dlrm_checkpointer", "checkpointer.log")

    def _open(self, module: str, log: str, *arguments: str) -> ForkServerProcess:
        own = {
            Env.TERMINATION_LOG: str(self.folder / log.replace(".log", "-termination.json"))
        }  # as each container has
        environment = {key: value for key, value in (os.environ | self.environment | own).items() if value}
        argv = [module, "--job", str(self.folder / "job.json"), *arguments]
        (self.folder / log).write_text("")
        process = gang_context().Process(target=run_module, args=(argv, environment, self.constants, self.folder / log))
        process.start()
        return process

    def wait(self, timeout_s: float = 300.0) -> int:
        """Wait for the launcher and the checkpointer; the launcher's exit code."""
        assert self.launcher is not None
        code = exit_code(self.launcher, timeout_s)
        if self.checkpointer is not None:
            exit_code(self.checkpointer, 180.0)
        return code

    def run(self, *, checkpointer: bool = True) -> int:
        """Start, and wait."""
        self.start(checkpointer=checkpointer)
        return self.wait()

    def wait_for_step(self, step: int, timeout_s: float = 180.0) -> None:
        """Wait until some step is done."""
        deadline = time.monotonic() + timeout_s
        while not any(line["step"] >= step for line in self.lines()):
            assert time.monotonic() < deadline, self.log()
            assert self.launcher is None or self.launcher.is_alive(), self.log()
            time.sleep(0.01)

    def lines(self) -> list[dict[str, Any]]:
        """Steps in ``progress.jsonl``; a line that is still being written is left out."""
        path = self.work / "progress.jsonl"
        text = path.read_text() if path.exists() else ""
        lines = [json.loads(line) for line in text.split("\n")[:-1]]
        return [line for line in lines if "loss" in line]

    def result(self) -> dict[str, Any]:
        """``result.json``."""
        result: dict[str, Any] = json.loads((self.work / "result.json").read_text())
        return result

    def termination(self) -> TerminationMessage:
        """Return the trainer's termination message."""
        message = TerminationMessage.decode((self.folder / "trainer-termination.json").read_bytes())
        assert message is not None
        return message

    def log(self) -> str:
        """Everything that the trainer logged."""
        return (self.folder / "trainer.log").read_text()

    def rank_pids(self) -> list[int]:
        """Pids of the ranks, in order."""
        assert self.launcher is not None
        children = Path(f"/proc/{self.launcher.pid}/task/{self.launcher.pid}/children").read_text().split()
        return sorted(map(int, children))

    def close(self) -> None:
        """Kill what still runs."""
        for process in (self.launcher, self.checkpointer):
            if process is not None:
                process.kill()
                process.join()


def exit_code(process: ForkServerProcess, timeout_s: float) -> int:
    """Wait for a process; its exit code."""
    process.join(timeout_s)
    assert process.exitcode is not None, f"still running after {timeout_s:.0f} s"
    return process.exitcode


def alive(pid: int) -> bool:
    """Return whether a process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
