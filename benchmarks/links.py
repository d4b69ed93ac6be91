"""Wire formats by link: ``python -m benchmarks.links [--mbit N] [--quick] [--repeats N]``; needs root.

Two network namespaces stand for nodes of two ranks each, on one machine. A veth pair joins them, and ``tc tbf`` shapes
both of its ends. The link and the loops of the ranks are measured; then the planner chooses formats
(``training.communication`` auto), and steps of its plan alternate with those of plans with one format for all links.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import multiprocessing
import os
import signal
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, ClassVar

import torch

from benchmarks.measure import Pairs, Result, report, tell
from dlrm_api.hardware import parse_profile
from dlrm_api.job import DLRMJobSpec, parse_job
from dlrm_api.plan import Plan
from dlrm_api.process import usable_cpus
from dlrm_api.training import RowCodecs
from dlrm_api.wire import CODECS
from dlrm_cli.loops import run_ranks
from dlrm_planner import plan_job
from dlrm_trainer.data import open_reader
from dlrm_trainer.distributed.rendezvous import GLOO_INTERFACES, RankGroup
from dlrm_trainer.embedding import place
from dlrm_trainer.learner import Learner
from dlrm_trainer.train import prepared_ahead

NODES, PER_NODE, SAMPLES = 2, 2, 2_048
RANKS = NODES * PER_NODE
ADDRESSES, PORT, PATIENCE_S = ("198.18.0.1", "198.18.0.2"), 29_500, 60.0
INTERFACE, BURST, MAX_QUEUE = "nodes0", "128kb", "200ms"
CLONE_NEWNET = 0x40000000
PROBE_BYTES, PROBES = 1 << 20, 21
"""What a rank sends to measure a link, and how often; the first time does not count."""
FILL = 2
"""First steps of a block that do not count: ids of later ones are not ahead yet."""
AUTO = "auto"


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Describe a line."""

    mbit: int
    against: str
    benchmark: ClassVar[str] = "links"

    @property
    def shown(self) -> dict[str, Any]:
        """See ``measure.Described``."""
        return {"nodes": NODES, "ranks_per_node": PER_NODE, "mbit": self.mbit}


@contextlib.contextmanager
def shaped_nodes(mbit: int) -> Iterator[list[str]]:
    """Make two network namespaces whose only link carries so many megabits per second each way; remove them."""
    names = [f"dlrm-links-{os.getpid()}-{number}" for number in range(NODES)]
    try:
        for name in names:
            _run("ip", "netns", "add", name)
        ends = [["name", INTERFACE, "netns", name] for name in names]
        _run("ip", "link", "add", *ends[0], "type", "veth", "peer", *ends[1])
        for name, address in zip(names, ADDRESSES, strict=True):
            _run("ip", "-n", name, "addr", "add", f"{address}/30", "dev", INTERFACE)
            for device in ("lo", INTERFACE):
                _run("ip", "-n", name, "link", "set", "dev", device, "up")
            shape = ["rate", f"{mbit}mbit", "burst", BURST, "latency", MAX_QUEUE]
            _run("tc", "-n", name, "qdisc", "add", "dev", INTERFACE, "root", "tbf", *shape)
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False, stderr=subprocess.DEVNULL)


def job(codec: str, dim: int) -> DLRMJobSpec:
    """Return the job in one format for all links, or in those that the plan chooses."""
    table = {"rows": 20_000, "dim": dim, "pooling": "sum", "maxLookups": 1, "pin": {"sharding": "table"}}
    model = {
        "denseFeatures": [f"I{number + 1}" for number in range(13)],
        "bottomMlp": [128, dim],
        "topMlp": [128, 1],
        "tableGroups": [{"name": "table", "count": 26, "template": table}],
    }
    data = {
        "format": "synthetic",
        "synthetic": {"samples": 2**20, "evalSamples": 0},
        "globalBatchSize": SAMPLES,
        "virtualShards": RANKS,
    }
    spec = {
        "model": model,
        "data": data,
        "training": {"communication": {"forward": codec, "backward": codec}},
        "trainer": {"replicas": NODES, "processesPerReplica": PER_NODE, "threadsPerProcess": 1},
        "checkpoint": {"uri": "file:///nowhere"},
    }
    return parse_job({"metadata": {"name": "links"}, "spec": spec}).spec


class Ranks:
    """Run one process for each rank, in the namespace of its node."""

    def __init__(self, names: Sequence[str]) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        # Ctrl-C is for this process, which ends the others: they inherit that it is ignored.
        handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
        for rank in range(RANKS):
            pipe, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, names[rank // PER_NODE]), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(pipe)
            self._processes.append(process)
        signal.signal(signal.SIGINT, handler)

    def ask(self, what: str, *arguments: Any) -> list[Any]:
        """Have every rank answer a question; what they return, rank by rank."""
        for pipe in self._pipes:
            pipe.send((what, *arguments))
        return [pipe.recv() for pipe in self._pipes]

    def close(self) -> None:
        """End them."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()


class Rank:
    """Answer for one rank."""

    def __init__(self, rank: int) -> None:
        self._rank, (host, *_) = rank, ADDRESSES
        self._gang = RankGroup(rank, RANKS, host, PORT, host, per_node=PER_NODE)
        self._gang.meet(PATIENCE_S, PATIENCE_S, lambda: None)
        self._learners: dict[str, tuple[DLRMJobSpec, Learner]] = {}

    def probe(self, to_node: bool) -> float:
        """Return the bytes per second that this rank sends, while all send to another rank of their node, or not."""
        shift = PER_NODE if to_node else 1
        other = (self._rank + shift) % RANKS if to_node else self._rank ^ 1
        sizes = [PROBE_BYTES * (peer == other) for peer in range(RANKS)]
        message, taken = torch.ones(PROBE_BYTES, dtype=torch.uint8), list[float]()
        for _ in range(PROBES):
            self._gang.collectives.barrier()
            start = time.perf_counter()
            self._gang.collectives.all_to_all("small", message, sizes, sizes)
            taken.append(time.perf_counter() - start)
        return PROBE_BYTES / statistics.median(taken[1:])

    def make(self, name: str, spec: DLRMJobSpec, plan: Plan) -> None:
        """Make the learner of a side."""
        planned, ours = spec.with_row_codecs(plan.row_codecs), self._gang.collectives
        placement = place(spec.model, plan, RANKS)
        learner = Learner(planned, placement, ours, id_collectives=self._gang.id_collectives)
        learner.start(spec.training.seed)
        self._learners[name] = planned, learner

    def train(self, name: str, first: int, stop: int) -> float:
        """Train a side on some batches; return the median seconds of a step."""
        spec, learner = self._learners[name]
        batches, taken = open_reader(spec, "train", self._rank, RANKS).iterate(first, stop), list[float]()
        self._gang.collectives.barrier()
        with contextlib.closing(batches):
            start = time.perf_counter()
            for prepared in prepared_ahead(batches, learner.send, learner.prepare, depth=0, sent_ahead=1):
                computed = learner.compute(prepared, SAMPLES)
                learner.apply(computed, 1.0)
                taken.append(time.perf_counter() - start)
                start = time.perf_counter()
        return statistics.median(taken[FILL:])


def measure(mbit: int, steps: int, repeats: int, loop_repeats: int, dim: int) -> None:
    """Measure loops, unless ``loop_repeats`` is 0, and the link; plan, and run all sides in turn."""
    tell(f"measuring the loops of {RANKS} ranks")
    loops = run_ranks(RANKS, loop_repeats) if loop_repeats else []
    with shaped_nodes(mbit) as names, contextlib.closing(Ranks(names)) as ranks:
        inside, between = (sum(ranks.ask("probe", to_node)) / NODES for to_node in (False, True))
        inside_s = {"intra_node_bytes_per_s": inside}
        link = Result(metric="link_bytes_per_s", value=between, setting={"mbit": mbit}, measured=inside_s)
        link.show(Setting.benchmark, "link")
        # A node has one part of this machine's processors, on which its ranks are as fast as all were together.
        of_node = [each.model_copy(update={"processes": PER_NODE}).model_dump() for each in loops]
        profile = parse_profile(
            {
                "metadata": {"name": "half-of-this-machine"},
                "spec": {
                    "cpus": usable_cpus() / NODES,
                    "tiers": {"ddr": {"bytes": "64Gi"}},
                    "network": {"intraNodeBytesPerSecond": inside / PER_NODE, "interNodeBytesPerSecond": between},
                    "loops": of_node,
                },
            }
        )
        plans = {name: plan_job(job(name, dim), profile) for name in (AUTO, *CODECS)}
        for reason in (each for each in plans[AUTO].reasons if each.startswith("rows travel")):
            tell(reason)
        for name, plan in plans.items():
            ranks.ask("make", name, job(name, dim), plan)
        _alternate(ranks, plans, mbit, steps, repeats)


def _alternate(ranks: Ranks, plans: dict[str, Plan], mbit: int, steps: int, repeats: int) -> None:
    taken: dict[str, list[float]] = {name: [] for name in plans}
    first, sides = 0, [*plans]
    # The first round may have to load kernels.
    for repeat in range(repeats + 1):
        for name in sides if repeat % 2 == 0 else sides[::-1]:
            seconds = max(ranks.ask("train", name, first, first + steps))
            taken[name] += [1e3 * seconds] if repeat else []
        first += steps
        tell(f"round {repeat} of {repeats}")
    ours = plans[AUTO]
    for name in CODECS:
        report(
            Setting(mbit=mbit, against=name),
            "step_ms",
            Pairs(taken[AUTO], taken[name]),
            codecs=_shown(ours.row_codecs),
            predicted_ms=_predicted_ms(ours),
            their_predicted_ms=_predicted_ms(plans[name]),
        )


def _predicted_ms(plan: Plan) -> float | None:
    """Return the time of a step; None without measured loops."""
    seconds = plan.predicted.step_seconds
    return None if seconds is None else 1e3 * seconds


def _shown(codecs: RowCodecs | None) -> dict[str, Any]:
    return {} if codecs is None else codecs.model_dump(by_alias=False)


def _serve(pipe: Connection, rank: int, name: str) -> None:
    """Run the process of a rank: answer until it is killed, or its parent is gone."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(1, signal.SIGKILL)
    with Path("/run/netns", name).open() as namespace:
        if libc.setns(namespace.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter network namespace {name}")
    os.environ[GLOO_INTERFACES] = INTERFACE
    torch.set_num_threads(1)
    try:
        answers = Rank(rank)
        while True:
            what, *arguments = pipe.recv()
            pipe.send(getattr(answers, what)(*arguments))
    except EOFError:
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def _run(*command: str) -> None:
    subprocess.run(command, check=True)


def main() -> int:
    """Measure at one rate of the link.

    Returns:
        1 if this machine cannot make the link, or a rank failed, else 0.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.links", description=__doc__)
    parser.add_argument("--mbit", type=int, default=500, help="of the link between the nodes, each way [%(default)s]")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: does it run here?")
    parser.add_argument("--repeats", type=int, default=None)
    options = parser.parse_args()
    # Ends by the same path as after Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    # Ranks that are killed at the end leave a store that others still ask.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    steps, repeats, loop_repeats, dim = (8, 2, 0, 16) if options.quick else (20, 9, 3, 64)
    try:
        measure(options.mbit, steps, options.repeats or repeats, loop_repeats, dim)
    except KeyboardInterrupt:
        return 130
    except (subprocess.CalledProcessError, FileNotFoundError, EOFError) as error:
        tell(f"failed: {error or 'a rank ended: its words are above'}; needs root, ip and tc")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
