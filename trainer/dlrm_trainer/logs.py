"""One format for the logs of all processes of a pod."""

from __future__ import annotations

import logging

OURS = ("dlrm_trainer", "dlrm_checkpointer")


def log_to_stderr(who: str) -> None:
    """Log warnings of everyone and state changes of our own; fbgemm tells pages about each table at level INFO.

    Args:
        who: the process, such as ``rank 0``.
    """
    logging.basicConfig(level=logging.WARNING, format=f"%(asctime)s {who} %(levelname)s %(message)s", force=True)
    for name in OURS:
        logging.getLogger(name).setLevel(logging.INFO)
