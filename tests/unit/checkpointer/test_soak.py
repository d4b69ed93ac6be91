"""Jobs at random, whose gangs, sidecars and store fail at random: no commit is lost and no state is mixed.

Each schedule is a function of its seed alone, down to the order of the calls of the store. ``SOAK_SCHEDULES`` says how
many there are, ``SOAK_SEED`` which is the first (see ``make soak``).
"""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import pytest

from dlrm_testing.checkpointer.lives import ShutdownPolicy
from dlrm_testing.checkpointer.turns import Clock

SCHEDULES = int(os.environ.get("SOAK_SCHEDULES", "30"))
FIRST_SEED = int(os.environ.get("SOAK_SEED", "0"))
MAX_LIFE_S = 10
"""One takes a fifth of a second where nothing else runs."""
PROGRESS = 100
"""Schedules between two lines."""


@pytest.mark.slow
@pytest.mark.timeout(600 + MAX_LIFE_S * SCHEDULES)
def test_no_schedule_of_faults_loses_a_commit_or_mixes_states(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock, new_model, new_pod, few_rows
):
    for number, seed in enumerate(range(FIRST_SEED, FIRST_SEED + SCHEDULES)):
        random.seed(seed)
        monkeypatch.setattr("dlrm_checkpointer.format.chunk.CHUNK_BYTES", random.choice([200, 1_000, 32 << 20]))
        life = ShutdownPolicy(seed, tmp_path / str(seed), clock, new_model, new_pod, few_rows)
        try:
            life.run()
        except BaseException as error:
            error.add_note(f"{life}; again: SOAK_SCHEDULES=1 SOAK_SEED={seed} python -m pytest {Path(__file__)}")
            raise
        finally:
            for gang in life.gangs:
                gang.vanish()
            shutil.rmtree(life.folder, ignore_errors=True)
        if (number + 1) % PROGRESS == 0:
            print(f"{number + 1} of {SCHEDULES} schedules, up to seed {seed}", flush=True)
