"""kill -9 of any process at random moments: the end is byte for byte that of an undisturbed run.

The moments come from a seed that is printed; ``DLRM_KILL_SEED`` sets it, to see a failure again.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections import Counter
from typing import Any

import psutil
import pytest

from dlrm_testing.repeats import repeats
from dlrm_testing.trainer.sample_ledgers import records

pytestmark = pytest.mark.slow

UNIQUE = {
    "hash": "unique",
    "buckets": 2,
    "admission": {"probability": 0.7},
    "eviction": {"keep": "useful", "maxAgeSamples": [5_000]},
    "unknown": "shared",
    "sharedRows": 20,
    "dimension": {"keepBytes": 0.95},
}
MODEL = {
    "tables": [
        {"name": "C1", "rows": 300, "dim": 8, "embedding": {"dimension": {"keepBytes": 0.7}}},
        {"name": "C2", "rows": 400, "dim": 8, "embedding": UNIQUE},
        {"name": "C3", "rows": 50, "dim": 16, "project": True},
    ]
}
"""Of C2's ids a quarter have rows: they come and go in every maintenance. C1 keeps some columns of its rows."""
KILLS = repeats(8, soak=200)
"""Kills in all."""
KILLS_A_LIFE = 10
"""Most kills in one run to the end."""
EPOCHS = 8
EPOCH_STEPS = 60
SAMPLES = 64 * (EPOCH_STEPS - 1) + 23
MAX_STEPS_APART = 96
"""Most steps between two kills, so that they reach into the last epochs."""
VICTIMS = {"rank": 4, "launcher": 2, "sidecar": 2, "dlrmctl": 2}
"""Kinds of processes, by how often each is to be killed; ranks are there for the shortest part of an attempt."""


def options(local: Any, name: str) -> tuple[str, ...]:
    store = (local.folder / f"snapshots-{name}").as_uri()
    workdir = str(local.folder / f"work-{name}")
    return ("--workdir", workdir, "--set", f"spec.checkpoint.uri={store}", "--digest", "--ledger")


def step_of(local: Any, name: str) -> int:
    path = local.folder / f"work-{name}" / "progress.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def pids(local: Any, name: str, dlrmctl: Any) -> dict[str, list[int]]:
    """Pids of each kind of process that lives now."""
    found: dict[str, list[int]] = {"dlrmctl": [dlrmctl.pid], "rank": [], "launcher": [], "sidecar": []}
    for child in psutil.Process(dlrmctl.pid).children(recursive=False):
        try:
            command = " ".join(child.cmdline())
            if "dlrm_checkpointer" in command:
                found["sidecar"].append(child.pid)
            elif "dlrm_trainer" in command:
                found["launcher"].append(child.pid)
                found["rank"] += [rank.pid for rank in child.children() if rank.status() != psutil.STATUS_ZOMBIE]
        except psutil.NoSuchProcess:
            continue
    return found


def wait_for_a_moment(local: Any, name: str, dlrmctl: Any, dice: random.Random) -> None:
    """Wait until a random time after the start, or a random number of steps further."""
    if dice.random() < 0.3:
        deadline = time.monotonic() + dice.uniform(0, 8)
        while time.monotonic() < deadline and dlrmctl.poll() is None:
            time.sleep(0.01)
        return
    first, wanted = step_of(local, name), dice.randint(1, MAX_STEPS_APART)
    deadline = time.monotonic() + 40
    while dlrmctl.poll() is None and time.monotonic() < deadline:
        now = step_of(local, name)
        first = min(first, now)  # a restart takes the lines after its snapshot away
        if now - first >= wanted:
            return
        time.sleep(0.005)


def disturb(local: Any, name: str, dice: random.Random, told: Counter[str]) -> Any:
    """Run the job to its end, with kills that are left; the command starts again whenever it is gone."""
    dlrmctl = local.start(*options(local, name))
    kills_left = min(KILLS_A_LIFE, KILLS - told.total())
    while True:
        if dlrmctl.poll() is not None:
            stdout, stderr = dlrmctl.communicate()
            if dlrmctl.returncode == 0:
                return json.loads(stdout)
            assert dlrmctl.returncode == -signal.SIGKILL, stderr
            dlrmctl = local.start(*options(local, name))
        if kills_left:
            wait_for_a_moment(local, name, dlrmctl, dice)
            alive = pids(local, name, dlrmctl) if dlrmctl.poll() is None else {}
            kinds = [kind for kind in VICTIMS if alive.get(kind)]
            if kinds:
                kind = dice.choices(kinds, [VICTIMS[each] for each in kinds])[0]
                victim = dice.choice(alive[kind])
                print(f"{name}: kill {kind} {victim} at step {step_of(local, name)}")
                os.kill(victim, signal.SIGKILL)
                told[kind] += 1
                kills_left -= 1
                if kind == "dlrmctl":
                    dlrmctl.wait()
        time.sleep(0.02)


def losses(local: Any, name: str) -> dict[int, float]:
    """Loss of each step."""
    lines = map(json.loads, (local.folder / f"work-{name}" / "progress.jsonl").read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def epochs_of(local: Any, name: str) -> dict[int, list[int]]:
    """Ids of the samples of each epoch, over all ranks, in the order of the ledgers."""
    seen: dict[int, list[int]] = {}
    for step, ids in records(local.folder / f"work-{name}" / "ledger"):
        seen.setdefault((step - 1) // EPOCH_STEPS, []).extend(ids.tolist())
    return seen


@pytest.mark.soak
@pytest.mark.timeout(600 + 90 * KILLS)
def test_killing_any_process_at_any_moment_changes_no_byte_of_the_result(local: Any) -> None:
    seed = int(os.environ.get("DLRM_KILL_SEED", random.SystemRandom().randrange(2**32)))
    print(f"DLRM_KILL_SEED={seed}")
    dice = random.Random(seed)
    synthetic = {"samples": SAMPLES, "evalSamples": 2_000, "noise": 0.0, "idsPerRow": 4}
    local.write(model=MODEL, trainer={"processesPerReplica": 2}, data={"epochs": EPOCHS, "synthetic": synthetic})
    undisturbed = local.done(*options(local, "quiet"))
    told: Counter[str] = Counter()

    disturbed = []
    while told.total() < KILLS:
        disturbed.append(disturb(local, f"life-{len(disturbed)}", dice, told))

    print(f"killed: {dict(told)}")
    for life, result in enumerate(disturbed):
        assert losses(local, f"life-{life}") == losses(local, "quiet")
        assert result["state_digest"] == undisturbed["state_digest"]
        assert result["eval"] == undisturbed["eval"]
        for epoch in range(EPOCHS):
            assert sorted(epochs_of(local, f"life-{life}")[epoch]) == list(range(SAMPLES))
    check_another_world_size(local, undisturbed)


def check_another_world_size(local: Any, undisturbed: dict[str, Any]) -> None:
    """Restored at another world size, before training continues, the state is the same."""
    setting = ("--set", "spec.trainer.processesPerReplica=4", "--workdir", str(local.folder / "work-as-4"))
    restored = local.done(*options(local, "quiet"), *setting)
    assert restored["world_size"] == 4
    assert restored["step"] == undisturbed["step"]
    assert restored["state_digest"] == undisturbed["state_digest"]
