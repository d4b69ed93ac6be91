"""What training loses to a snapshot until it is durable, and to a slow store: a part of ``benchmarks.snapshots``."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import psutil
import torch

from benchmarks.carrying import Carrier
from benchmarks.loopback import Service
from benchmarks.measure import Line, Pairs, tell
from benchmarks.scratch import SHARED_MEMORY, Scratch
from benchmarks.shapes import Shape, job_of, quick
from benchmarks.slow_link import LOOPBACK, slow_link
from benchmarks.training_cuts import TOUCHED, AsyncSave, Cuts, Training
from dlrm_api.checkpoint import Bits, PolicyName
from dlrm_api.names import Env
from dlrm_checkpointer.format.attempts import claim_attempt
from dlrm_checkpointer.read.restore import newest_snapshot

BITS: Bits = 8
POLICIES: tuple[PolicyName, ...] = ("intermittent", "consecutive")
"""The second stores what the cut holds and reads nothing."""
SLOWED_ROWS = 100_000
"""Of each table, where the store is slow: of the whole model an upload would take minutes."""
SLOWED = 10
"""Times that the slow store takes what the other does."""
PATIENCE_S = 120.0


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Describe a line about training during an upload."""

    rows: int
    tables: int
    against: str
    dim: int = 64
    bits: Bits = BITS
    policy: PolicyName = POLICIES[0]
    benchmark: ClassVar[str] = "snapshots"

    @property
    def shown(self) -> dict[str, Any]:
        """See ``measure.Described``."""
        return {
            "bits": self.bits,
            "policy": self.policy,
            "dim": self.dim,
            "tables": self.tables,
            "rows": self.rows,
            "touched": TOUCHED,
            "threads": torch.get_num_threads(),
        }


class Sidecar:
    """Cuts, and the checkpointer in a process of its own that stores them.

    Args:
        training: whose cuts.
        service: with the store.
        prefix: of the store's keys.
        endpoint: where the service is reached.
        policy: of the snapshots.
    """

    def __init__(
        self, training: Training, service: Service, prefix: str, endpoint: str, policy: PolicyName = POLICIES[0]
    ) -> None:
        self._training = training
        self.prefix, self.endpoint = prefix, endpoint
        self._attempt = claim_attempt(service.store(prefix), None, "")
        self._scratch = Scratch(SHARED_MEMORY)
        self.folder = self._scratch.path
        self._cuts = Cuts(training, self.folder, self._attempt)
        job = job_of(training.shape).model_dump(mode="json", by_alias=True, exclude_none=True)
        job["spec"]["checkpoint"] |= {
            "uri": f"s3://{service.bucket}/{prefix}",
            "s3": {"endpoint": endpoint},
            "bits": BITS,
            "policy": policy,
            "retention": {"keepLast": 1},
        }
        (self.folder / "job.json").write_text(json.dumps(job))
        env = {Env.HANDOFF_DIR: str(self.folder), Env.CREDENTIALS_DIR: str(service.keys)}
        command = [sys.executable, "-m", "dlrm_checkpointer", "--job", str(self.folder / "job.json")]
        port = {Env.CHECKPOINTER_PORT: str(_free_port())}
        self._process = subprocess.Popen(command, env={**os.environ, **env, **port}, stderr=subprocess.DEVNULL)
        self._step, self._began = 0, 0.0
        self.took_s = 0.0
        """From the newest cut to its commit."""

    def begin(self) -> None:
        """Begin a cut as a rank does."""
        self._step, self._began, self.took_s = self._training.steps, time.monotonic(), 0.0
        self._cuts.begin()

    def durable(self) -> bool:
        """Go on with the cut, as a rank does between two steps; whether the snapshot is committed."""
        self._cuts.advance()
        if self._process.poll() is not None:
            raise RuntimeError(f"the checkpointer ended with {self._process.returncode}")
        committed = self._cuts.writer.committed_step() == self._step
        if committed and not self.took_s:
            self.took_s = time.monotonic() - self._began
        return committed

    @property
    def cpu_s(self) -> float:
        """Return the CPU seconds of the checkpointer since its start."""
        return cpu_s(self._process.pid)

    def close(self) -> None:
        """End the checkpointer, give the memory back."""
        self._cuts.close()
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(PATIENCE_S)
        self._process.kill()
        self._process.wait()
        self._scratch.close()


def lines(service: Service, quick_run: bool) -> Iterator[Line]:
    """Time lost to a save against that of dcp, in turn.

    Args:
        service: with the store.
        quick_run: a small model.
    """
    shape, steps, repeats = _sized(Shape(), quick_run)
    training = Training(shape)
    training.undisturbed_s(steps)
    with tempfile.TemporaryDirectory() as scratch:
        theirs = AsyncSave(training.learner, Path(scratch) / "dcp")
        for policy in POLICIES:
            tell(f"time lost until a snapshot is durable, {policy}: {shape.tables * shape.rows:,} rows")
            with closing(Sidecar(training, service, f"uploading/{policy}", service.endpoint, policy)) as ours:
                setting = Setting(rows=shape.rows, tables=shape.tables, against="dcp-async-save", policy=policy)
                yield lost(training, ours, theirs, service, setting, steps, repeats)


def slow_lines(service: Service, quick_run: bool) -> Iterator[Line]:
    """Time steps during an upload over a link with a tenth of the unthrottled write rate.

    Args:
        service: with the store.
        quick_run: a small model.
    """
    shape, steps, repeats = _sized(replace(Shape(), rows=SLOWED_ROWS), quick_run)
    training, prefix = Training(shape), "slow/rate"
    training.undisturbed_s(steps)
    with closing(Sidecar(training, service, prefix, service.endpoint, "consecutive")) as ours:
        for _ in range(3):
            training.beside(ours)
        rate = sum(object_sizes(service, prefix)) / ours.took_s / SLOWED
    tell(f"steps beside an upload at {rate / 1e6:.1f} MB/s")
    with slow_link(service.endpoint, rate) as endpoint:
        for policy in POLICIES:
            with closing(Sidecar(training, service, f"slow/{policy}", endpoint, policy)) as late:
                setting = Setting(rows=shape.rows, tables=shape.tables, against="undisturbed", policy=policy)
                yield from beside_slow(training, late, service, setting, repeats)


def _sized(shape: Shape, quick_run: bool) -> tuple[Shape, int, int]:
    """Return the model, the number of steps timed alone, and the repeats."""
    return (quick(shape), 10, 2) if quick_run else (shape, 30, 5)


def lost(
    training: Training, ours: Sidecar, theirs: AsyncSave, service: Service, setting: Setting, steps: int, repeats: int
) -> Line:
    """Yield the line of lost time; the first two rounds, one with a full snapshot, are not counted.

    What the server itself computes is no part of a real training machine's work. What that costs is measured: the
    server takes the same bytes from a process that only sends, and the time then lost, for each second that these two
    computed, is taken off for each second that the server computed for us.
    """
    for _ in range(2):
        training.lost_s(ours, steps)
    training.lost_s(theirs, steps)
    raw: list[float] = []
    peer: list[float] = []
    spent = {name: list[float]() for name in ("server_cpu_ms", "sidecar_cpu_ms", "durable_after_ms")}
    carried_s = carrying_s = 0.0
    with closing(Carrier(service, service.endpoint, object_sizes(service, ours.prefix))) as carrier:
        for _ in range(repeats):
            before = cpu_s(service.process), ours.cpu_s
            raw.append(training.lost_s(ours, steps))
            for name, seconds in zip(
                spent, (cpu_s(service.process) - before[0], ours.cpu_s - before[1], ours.took_s), strict=True
            ):
                spent[name].append(1_000 * seconds)
            peer.append(training.lost_s(theirs, steps))
            carrier.prepare()
            before = cpu_s(service.process), carrier.cpu_s
            carried_s += training.lost_s(carrier, steps)
            carrying_s += cpu_s(service.process) - before[0] + carrier.cpu_s - before[1]
    pairs, price = Pairs(), carried_s / carrying_s
    for mine, other, server_ms in zip(raw, peer, spent["server_cpu_ms"], strict=True):
        pairs.add(1_000 * mine - price * server_ms, 1_000 * other)
    measured = {name: float(np.median(each)) for name, each in spent.items()}
    with_server = {"with_server_ms": 1_000 * float(np.median(raw)), "lost_s_for_a_server_cpu_s": price}
    return Line(setting=setting, metric="lost_ms", pairs=pairs, measured=measured | with_server)


def beside_slow(training: Training, late: Sidecar, service: Service, setting: Setting, repeats: int) -> Iterator[Line]:
    """Yield the lines of step times during a slow upload, without the cut itself.

    Against steps that nothing disturbs, and against steps beside the same bytes on the same way to the server, from a
    process that only sends.
    """
    alone, beside_bytes, uploads = Pairs(), Pairs(), []
    for _ in range(2):
        training.beside(late)
    with closing(Carrier(service, late.endpoint, object_sizes(service, late.prefix))) as carrier:
        for _ in range(repeats):
            _, taken = training.beside(late)
            mine = 1_000 * float(np.mean(taken))
            uploads.append(1_000 * late.took_s)
            alone.add(mine, 1_000 * training.undisturbed_s(len(taken)))
            carrier.prepare()
            beside_bytes.add(mine, 1_000 * float(np.mean(training.beside(carrier)[1])))
    measured = {"durable_after_ms": float(np.median(uploads)), "slowed": SLOWED}
    for against, pairs in (("undisturbed", alone), ("bytes-alone", beside_bytes)):
        yield Line(setting=replace(setting, against=against), metric="step_ms", pairs=pairs, measured=measured)


def object_sizes(service: Service, prefix: str) -> list[int]:
    """Bytes of each object of the newest snapshot."""
    snapshot, _ = newest_snapshot(service.store(prefix), check=None)
    assert snapshot is not None, "it was committed just now"
    return [entry.bytes for entry in snapshot.manifest.objects]


def cpu_s(process: int) -> float:
    """Seconds of processor time that a process took."""
    times = psutil.Process(process).cpu_times()
    return float(times.user + times.system)


def _free_port() -> int:
    with socket.create_server((LOOPBACK, 0)) as server:
        return int(server.getsockname()[1])
