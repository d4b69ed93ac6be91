"""Looks at the counters of a local attempt's processes now and then, and keeps them in its history."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from dlrm_api.errors import BadDataError
from dlrm_api.progress import CheckpointerProgress, Progress, SnapshotInfo
from dlrm_cli.cluster.exposition import samples
from dlrm_cli.cluster.figures import PodFigures, counts_of, pod_figures
from dlrm_cli.gang import Ports
from dlrm_cli.history import Committed, Counts, History, Look
from dlrm_cli.watch import TIMEOUT_S, answer_of, progress_of

POLL_S = 0.5
"""Time between two questions to the checkpointer: snapshots may follow each other fast."""
MOST_SHARE = 0.02
"""Of the time that may go to looks at counters: those of many tables take long to read."""


class Recorder:
    """Asks from a thread of its own, until closed. Whoever does not answer is left out of that look.

    Args:
        history: where it is kept.
        attempt: number of the attempt.
        ports: of its processes.
        last_snapshots: what sidecars that ended said of their newest snapshot; asked at the close, since the last
            commit comes as a sidecar ends.
    """

    def __init__(
        self, history: History, attempt: int, ports: Ports, last_snapshots: Callable[[], Sequence[SnapshotInfo]]
    ) -> None:
        self._history, self._attempt, self._ports, self._last_snapshots = history, attempt, ports, last_snapshots
        self._committed: int | None = None
        self._commit_sum_s = 0.0
        self._counted = False
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._record, name="recorder", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ask no more."""
        self._closed.set()
        self._thread.join(2 * TIMEOUT_S)
        for newest in self._last_snapshots():
            self._note(newest, None, None)

    def _record(self) -> None:
        due = time.monotonic()
        while not self._closed.wait(POLL_S):
            self._look_at_snapshots()
            if (began := time.monotonic()) >= due:
                self._look_at_trainers()
                due = began + max(self._history.every_s, (time.monotonic() - began) / MOST_SHARE)

    def _look_at_trainers(self) -> None:
        pods: list[PodFigures] = []
        for port in self._ports.trainers:
            text = answer_of(port, "/metrics")
            if text is None:
                return  # sums over some of the pods would look like counters that fell
            try:
                pods.append(pod_figures(text))
            except BadDataError:
                return
        counts, step = counts_of(pods), pods[0].step
        if step is None or not any(counts.stages.values()):
            return  # not a step is done: the number of steps may still be that before the restore
        now = time.time()
        if not self._counted:
            progress = progress_of(Progress, self._ports.trainers[0])
            if progress is None:
                return
            self._counted = True
            zero = Counts(ranks=counts.ranks)
            self._history.note(Look(time=now, attempt=self._attempt, step=progress.restored_step or 0, **dict(zero)))
        self._history.note(Look(time=now, attempt=self._attempt, step=step, **dict(counts)))

    def _look_at_snapshots(self) -> None:
        port = self._ports.checkpointers[0]
        said = progress_of(CheckpointerProgress, port)
        newest = None if said is None else said.last_snapshot
        if newest is not None and newest.step != self._committed:
            chain, commit_sum_s = _of_commits(answer_of(port, "/metrics") or "")
            self._note(newest, chain, None if commit_sum_s is None else commit_sum_s - self._commit_sum_s)
            self._commit_sum_s = commit_sum_s or self._commit_sum_s

    def _note(self, newest: SnapshotInfo, chain: int | None, commit_s: float | None) -> None:
        if newest.step == self._committed:
            return
        self._committed = newest.step
        self._history.note(
            Committed(
                time=newest.time,
                step=newest.step,
                kind=newest.kind,
                bits=newest.bits,
                bytes=newest.bytes,
                uri=newest.uri,
                chain=chain,
                commit_s=commit_s,
            )
        )


def _of_commits(text: str) -> tuple[int | None, float | None]:
    """Length of the newest chain, and the time of all commits (s), as a checkpointer's ``/metrics`` says them."""
    found = {sample.name.removeprefix("dlrm_checkpointer_"): sample.value for sample in samples(text)}
    chain = found.get("chain_length")
    return None if chain is None else int(chain), found.get("commit_seconds_sum")
