"""Compile a trainer's loops while its image is built: train a job of seconds, with a sidecar and snapshots."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from dlrm_api.names import Env

WORK = Path("/tmp/warming")
"""The job's snapshots go there too; removed."""


def main(folder: Path) -> None:
    """Run ``folder``'s job.json by its plan.json.

    Raises:
        CalledProcessError: the trainer or its sidecar ended badly.
    """
    handoff, token = WORK / "handoff", WORK / "token"
    handoff.mkdir(parents=True)
    token.write_text("warming")
    own = {
        Env.HANDOFF_DIR: str(handoff),
        Env.TOKEN_FILE: str(token),
        Env.ATTEMPT: "1",
        Env.BIND: "127.0.0.1",
        "HOME": str(WORK),
    }
    environment = os.environ | own
    job = ["--job", str(folder / "job.json")]
    with subprocess.Popen([sys.executable, "-m", "dlrm_checkpointer", *job], env=environment) as sidecar:
        trainer = [sys.executable, "-m", "dlrm_trainer", *job, "--plan", str(folder / "plan.json")]
        try:
            subprocess.run(trainer, env=environment, check=True)
            if code := sidecar.wait():
                raise subprocess.CalledProcessError(code, "dlrm_checkpointer")
        finally:
            sidecar.terminate()
            shutil.rmtree(WORK)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
