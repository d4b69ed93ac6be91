"""Compile a trainer's loops while its image is built: train jobs of seconds, with a sidecar and snapshots."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from dlrm_api.names import Env

WORK = Path("/tmp/warming")
"""The jobs' snapshots go there too; removed after each."""
DIRECT = "block"
"""The job that needs a file system with direct I/O."""


def has_direct_io(folder: Path) -> bool:
    """Whether files of the folder can be read past the page cache."""
    path = folder / "direct"
    try:
        os.close(os.open(path, os.O_CREAT | os.O_RDWR | os.O_DIRECT))
    except OSError:
        return False
    finally:
        path.unlink(missing_ok=True)
    return True


def train(folder: Path) -> None:
    """Run ``folder``'s job.json by its plan.json; it may name files of the folder.

    Raises:
        CalledProcessError: the trainer or its sidecar ended badly.
    """
    handoff, tiers = WORK / "handoff", WORK / "tiers"
    handoff.mkdir()
    for tier in ("scm", "block"):
        (tiers / tier).mkdir(parents=True)
    own = {
        Env.HANDOFF_DIR: str(handoff),
        Env.TIER_DIR: str(tiers),
        Env.ATTEMPT: "1",
        Env.BIND: "127.0.0.1",
        "HOME": str(WORK),
    }
    environment = os.environ | own
    job = ["--job", "job.json"]
    sidecar_argv = [sys.executable, "-m", "dlrm_checkpointer", *job]
    with subprocess.Popen(sidecar_argv, env=environment, cwd=folder) as sidecar:
        trainer = [sys.executable, "-m", "dlrm_trainer", *job, "--plan", "plan.json"]
        try:
            subprocess.run(trainer, env=environment, cwd=folder, check=True)
            if code := sidecar.wait():
                raise subprocess.CalledProcessError(code, "dlrm_checkpointer")
        finally:
            sidecar.terminate()


def main(folder: Path) -> None:
    """Run each job of the folder, whose names are folders in it.

    Raises:
        CalledProcessError: a trainer or its sidecar ended badly.
    """
    for each in sorted(folder.iterdir()):
        WORK.mkdir()
        try:
            if each.name == DIRECT and not has_direct_io(WORK):
                print("no direct I/O in /tmp: loops of block storage are left for each pod to compile")
                continue
            train(each)
        finally:
            shutil.rmtree(WORK)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
