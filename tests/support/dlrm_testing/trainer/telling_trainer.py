"""The trainer, which tells the digest of its whole state after each step.

Run as ``python -m telling_trainer`` with the trainer's arguments; ``DIGESTS`` in the environment is the file of lines
"step digest" that rank 0 writes.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import dlrm_trainer.__main__
from dlrm_trainer.checkpointing.restore import live_digest
from dlrm_trainer.embedding import PreparedBatch
from dlrm_trainer.train import Training

train_step = Training.train_step


def step_and_tell(training: Training, prepared: PreparedBatch) -> tuple[bool, bool]:
    agreed = train_step(training, prepared)
    digest = live_digest(training.assembly.learner, training.collectives)
    if training.collectives.rank == 0:
        with Path(os.environ["DIGESTS"]).open("a") as file:
            print(training.step, digest, file=file)
    return agreed


Training.train_step = step_and_tell  # type: ignore[method-assign]

if __name__ == "__main__":
    sys.exit(dlrm_trainer.__main__.main())
