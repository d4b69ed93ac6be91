"""Learn which attempt this launcher runs: the pod's own, or one that the operator assigns after a restart in the pod.

The operator assigns an attempt once all trainers of the one before have ended. The pod's annotation says so, and a file
of a downward API volume follows the annotation.
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from pathlib import Path

from dlrm_api.names import secret_of_attempt
from dlrm_api.process import raise_device
from dlrm_trainer.settings import Settings

logger = logging.getLogger(__name__)

POLL_INTERVAL_S = 0.1


def note_launch(settings: Settings) -> int | None:
    """Record that a launcher started here; return the attempt that the one before it ran, None if it is the first.

    Call it before anything else can fail: a launcher that leaves no note is taken for one that never ran.

    Raises:
        DeviceError: the note cannot be written.
    """
    if settings.launched is None:
        return None
    earlier = _number(settings.launched)
    if earlier is None:
        _note(settings.launched, settings.attempt)
    return earlier


def take_assignment(settings: Settings, earlier: int | None) -> Settings:
    """Return the settings of the attempt to run; after an ``earlier`` one of this pod, wait until one is assigned.

    Ranks of different attempts never meet: each has its own secret, derived from the pod's.

    Raises:
        DeviceError: the note of it cannot be written.
    """
    if earlier is None or settings.assignment is None or settings.launched is None:
        return settings
    logger.info("waiting for the next attempt", extra={"attempt": earlier})
    while (assigned := _number(settings.assignment) or 0) <= earlier:
        time.sleep(POLL_INTERVAL_S)
    # Noted before it runs: whatever comes of it, no later launcher runs it again.
    _note(settings.launched, assigned)
    logger.info("restarting in the same pod", extra={"attempt": assigned})
    return replace(settings, attempt=assigned, gang_secret=secret_of_attempt(settings.gang_secret, assigned))


def _number(path: Path) -> int | None:
    """Return the number in a file; None if it holds none, as before the first assignment."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _note(path: Path, attempt: int) -> None:
    draft = path.with_name(f".{path.name}")
    try:
        draft.write_text(str(attempt))
        draft.replace(path)
    except OSError as error:
        raise_device(error, path, 0)
