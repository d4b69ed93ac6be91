"""kill -9 amid cuts that two ranks hand over while they train on: what is restored is one step's state, bit by bit.

The moments come from a seed that is printed; ``GRADUAL_KILL_SEED`` sets it, to see a failure again.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest

from dlrm_api.names import Env, ExitCode
from dlrm_checkpointer.handoff.protocol import HandoffDir, SegmentName
from dlrm_checkpointer.read.catalog import list_snapshots, verify_snapshot
from dlrm_checkpointer.read.restore import newest_snapshot, open_snapshot
from dlrm_stores.file import FileStore
from dlrm_testing.digests import snapshot_digest
from dlrm_testing.trainer.gangs import Pod, job_document, plan_document, small_job

SUPPORT = Path(__file__).parents[2] / "support"

pytestmark = pytest.mark.slow

STEPS = 100
STEP_S = 0.25
"""Of those who are disturbed, until one of their gradual cuts is committed: slow machines too have time for it."""
WORLD_SIZE = 2
BUDGET_BYTES = 200_000
"""Of the pod: a slice has a quarter of it, and an interval changes several times as much on each rank."""
KILLS = 2
"""Of each life."""
LATEST_S = 0.05
"""How long after a slice is seen its cut is disturbed, at most."""
TABLES = [
    {"name": "users", "rows": 60_000, "dim": 16, "maxLookups": 2, "avgLookups": 2},
    {"name": "items", "rows": 60_000, "dim": 16, "maxLookups": 2, "avgLookups": 2},
    {"name": "small", "rows": 30, "dim": 16},
]
CHANGES: dict[str, Any] = {
    "model": {"tables": TABLES, "bottomMlp": [16]},
    "data": {"synthetic": {"samples": 1_000_000, "evalSamples": 500, "alpha": 0.0}, "globalBatchSize": 256},
    "training": {"maxSteps": STEPS},
    "checkpoint": {"intervalSteps": 4, "bits": 32, "policy": "consecutive", "retention": {"keepLast": 1_000}},
}
Victim = Literal["sidecar", "rank", "both"]


def pod_in(folder: Path, module: str, budget: int = BUDGET_BYTES, **environment: str) -> Pod:
    """A pod with one of the test doubles as its trainer."""
    doubles = str(SUPPORT)
    path = os.pathsep.join((doubles, os.environ.get("PYTHONPATH", "")))
    plan = plan_document(small_job(folder, WORLD_SIZE, **CHANGES))
    plan["handoffBytes"] = [budget]
    pod = Pod(folder, job_document(folder, WORLD_SIZE, **CHANGES), plan, PYTHONPATH=path, **environment)
    pod.module = module
    return pod


@pytest.fixture(scope="module")
def digests(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """Digest of the state after each step of a run that nobody disturbs, and that takes no snapshots."""
    folder = tmp_path_factory.mktemp("undisturbed")
    told = folder / "digests"
    pod = pod_in(folder, "dlrm_testing.trainer.telling_trainer", DIGESTS=str(told), **{Env.HANDOFF_DIR: ""})
    assert pod.run(checkpointer=False) == ExitCode.DONE, pod.log()
    lines = (line.split() for line in told.read_text().splitlines())
    return {int(step): digest for step, digest in lines}


@pytest.fixture(params=["in slices", "by a thread"])
def pod(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Pod]:
    """Change its ranks to hand cuts over in segments, or by a thread each."""
    module, budget = (
        ("dlrm_testing.trainer.slow_trainer", BUDGET_BYTES)
        if request.param == "in slices"
        else ("dlrm_testing.trainer.copying_trainer", 1 << 28)
    )
    told = {"UNTIL": str(tmp_path / "hurry"), "COPIED": str(tmp_path / "copied")}
    made = pod_in(tmp_path, module, budget, FAULT=f"0 read 0 {STEP_S}", **told)
    yield made
    made.close()


class Life:
    """A run to its end, whoever is killed amid a cut."""

    def __init__(self, pod: Pod, dice: random.Random) -> None:
        self.pod, self.dice = pod, dice
        self.handoff = pod.folder / "handoff"
        self.store = FileStore(pod.folder / "store")
        self.disturbed: list[int] = []
        """Steps of the cuts that were on their way when somebody was killed."""
        self.left: set[SegmentName] = set()
        """Slices that the ranks before left: they say nothing of those who run now."""

    def kill(self, victim: Victim) -> None:
        """Kill in the middle of a gradual cut, and start again what is gone then."""
        pod = self.pod
        if pod.module == "dlrm_testing.trainer.copying_trainer":
            self._wait_for_draft()
        else:
            self.disturbed.append(self._wait_for_slice())
        time.sleep(self.dice.uniform(0.0, LATEST_S))
        assert pod.checkpointer is not None
        if victim != "rank":
            pod.checkpointer.kill()
        if victim != "sidecar":
            os.kill(self.dice.choice(pod.rank_pids()), signal.SIGKILL)
        if victim == "sidecar":
            pod.checkpointer.join()
            pod.start_checkpointer()
        else:
            assert pod.wait() != ExitCode.DONE, pod.log()
            self.left = set(HandoffDir(self.handoff).ready_segments())
            pod.start()

    def _wait_for_draft(self) -> None:
        """Until a rank copies rows into a draft that it made now."""
        deadline, began = time.monotonic() + 120, time.time()
        while not any(map(partial(_is_newer, began), self.handoff.glob("writing-*/rows.bin"))):
            assert time.monotonic() < deadline, self.pod.log()
            time.sleep(0.001)

    def _wait_for_slice(self) -> int:
        deadline = time.monotonic() + 120
        wanted = self.dice.randint(0, 2)
        while True:
            assert time.monotonic() < deadline, self.pod.log()
            assert self.pod.launcher is None or self.pod.launcher.is_alive(), self.pod.log()
            for name in HandoffDir(self.handoff).ready_segments() if self.handoff.exists() else []:
                if name not in self.left and name.number >= wanted:
                    return name.step
            time.sleep(0.001)

    def hurry(self) -> None:
        """Let training go on as fast as it can once a gradual cut is committed."""
        assert self.pod.launcher is not None
        while self.pod.launcher.is_alive() and not self.gradual():
            time.sleep(0.05)
        (self.pod.folder / "hurry").touch()

    def gradual(self) -> list[int]:
        """Steps of the committed cuts that went over while training went on."""
        if self.pod.module == "dlrm_testing.trainer.copying_trainer":
            copied = self.pod.folder / "copied"
            lines = [line.split() for line in copied.read_text().splitlines()] if copied.exists() else []
            slow = {int(step) for step, times in lines if int(times) > 1}
            return sorted(slow & {each.step for each in list_snapshots(self.store)})
        steps = (each.step for each in list_snapshots(self.store))
        return [step for step in steps if step < STEPS and self._slices(step) > len(TABLES)]

    def _slices(self, step: int) -> int:
        """In how many pieces a rank handed a committed cut over, at most: each is a chunk."""
        lists = (self.pod.folder / "store" / "parts" / f"{step:016d}").glob("*/*.json")
        return max(len(json.loads(path.read_text())["chunks"]) for path in lists)

    def check_snapshots(self, digests: dict[int, str]) -> list[int]:
        """Every snapshot is whole, and its state that of its step; returns the steps."""
        newest, reasons = newest_snapshot(self.store)
        assert reasons == []
        found = list_snapshots(self.store)
        assert newest is None or newest.step == max(each.step for each in found)
        for each in found:
            snapshot = open_snapshot(self.store, each.step, each.attempt)
            verify_snapshot(snapshot)
            assert snapshot_digest(snapshot) == digests[each.step], each
        return sorted(each.step for each in found)


def _is_newer(moment: float, path: Path) -> bool:
    try:
        return path.stat().st_mtime > moment
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("victim", ["sidecar", "rank", "both"])
def test_kill_9_during_gradual_cuts_leaves_single_steps_and_the_same_bits(
    pod: Pod, digests: dict[int, str], victim: Victim
) -> None:
    seed = int(os.environ.get("GRADUAL_KILL_SEED", random.SystemRandom().randrange(2**32)))
    print(f"GRADUAL_KILL_SEED={seed}")
    life = Life(pod, random.Random(f"{seed} {victim}"))
    pod.start()

    for _ in range(KILLS):
        life.kill(victim)
        life.check_snapshots(digests)
    life.hurry()
    code = pod.wait()

    assert code == ExitCode.DONE, pod.log()
    assert pod.checkpointer is not None
    assert pod.checkpointer.exitcode == ExitCode.DONE
    assert pod.result()["state_digest"] == digests[STEPS]
    committed = life.check_snapshots(digests)
    print(f"disturbed {life.disturbed}, committed {committed}, of these gradually {life.gradual()}")
    assert max(committed) == STEPS
    assert life.gradual()
