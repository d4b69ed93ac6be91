"""Report what the sidecar does: /progress and Prometheus metrics over HTTP."""

from __future__ import annotations

import threading
import time
from functools import partial
from typing import get_args

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from dlrm_api.errors import DLRMError, UsageError
from dlrm_api.process import EndpointHandler, EndpointServer
from dlrm_api.progress import CheckpointerProgress, SnapshotInfo
from dlrm_checkpointer.format.manifest import Kind
from dlrm_stores.base import RetryReason

STORE_ERROR_LENGTH = 1_024
COMMIT_BUCKETS_S = (0.1, 0.3, 1, 3, 10, 30, 60, 120, 300, 600, 1_800, 3_600)


class Status:
    """Hold the state that the sidecar's loop shares with its HTTP threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._progress = CheckpointerProgress(time=time.time())
        registry = self.registry = CollectorRegistry()
        gauge = partial(Gauge, namespace="dlrm_checkpointer", registry=registry)
        counter = partial(Counter, namespace="dlrm_checkpointer", registry=registry)
        self._committed = gauge("committed_step", "Step of the newest committed snapshot.")
        self._pending = gauge("pending_step", "Step handed over and not committed; -1: none.")
        self._commit_time = gauge("last_commit_timestamp_seconds", "When the newest snapshot was committed.")
        self._failing = gauge("store_failing", "1 while the store's last call failed.")
        self.uploaded_bytes = counter("uploaded_bytes", "Bytes of objects put.")
        self.merged_bytes = counter("merged_bytes", "Bytes of older objects read to be stored with a cut.")
        self.handed_over_bytes = counter("handed_over_bytes", "Bytes of cuts taken over.")
        self.slices = counter("slices", "Slices of cuts above the hand-off budget made durable.")
        self._chain = gauge("chain_length", "Older snapshots that the newest one needs; 0: it is full.")
        self._bits = gauge("bits", "Bits of an element of the newest snapshot's rows.")
        self._snapshot_bytes = gauge("snapshot_bytes", "Bytes of the newest snapshot's own objects.")
        self.commits = counter("commits", "Snapshots seen committed, by kind.", ["kind"])
        self.store_errors = counter("store_errors", "Failed rounds of store calls.")
        self._store_repeats = counter("store_repeats", "Calls of the store made again.", ["reason"])
        self.refused_cuts = counter("refused_cuts", "Cuts that can never be stored.")
        self.dropped_cuts = counter("dropped_cuts", "Cuts given up: incomplete or overtaken.")
        self.retired = counter("retired_snapshots", "Snapshots removed by retention.")
        self._commit_seconds = Histogram(
            "dlrm_checkpointer_commit_seconds", "From hand-over to commit.", registry=registry, buckets=COMMIT_BUCKETS_S
        )
        self._published_sequence = gauge("published_sequence", "Sequence number of the newest delta published.")
        self._published_step = gauge("published_step", "Step that it leads to.")
        self._deltas = counter("published_deltas", "Deltas published, by kind: full, delta.", ["kind"])
        self.published_bytes = counter("published_bytes", "Bytes of objects put for deltas.")
        self.publish_errors = counter("publish_errors", "Failed rounds of publishing.")
        # Series start at 0: one that begins with its first event shows no increase by it.
        for kind in get_args(Kind):
            self.commits.labels(kind)
        for reason in get_args(RetryReason):
            self._store_repeats.labels(reason)
        self._committed.set(-1)
        self._pending.set(-1)

    @property
    def progress(self) -> CheckpointerProgress:
        """Return what /progress answers now."""
        with self._lock:
            return self._progress

    def _update(self, **changes: object) -> None:
        with self._lock:
            self._progress = self._progress.model_copy(update={**changes, "time": time.time()})

    def set_pending(self, step: int | None) -> None:
        """Set the newest step that is handed over and not committed."""
        if step != self.progress.pending_step:
            self._update(pending_step=step)
        self._pending.set(-1 if step is None else step)

    def found(self, snapshot: SnapshotInfo) -> None:
        """Report a snapshot that existed when the sidecar started."""
        self._update(committed_step=snapshot.step, last_snapshot=snapshot)
        self._committed.set(snapshot.step)

    def committed(self, snapshot: SnapshotInfo, handed_over: float, chain_length: int, *, is_newest: bool) -> None:
        """Report a committed snapshot; one that is not the newest is only counted."""
        self._commit_seconds.observe(max(0.0, snapshot.time - handed_over))
        self.commits.labels(snapshot.kind).inc()
        if not is_newest:
            return
        self._update(committed_step=snapshot.step, last_snapshot=snapshot)
        self._committed.set(snapshot.step)
        self._commit_time.set(snapshot.time)
        self._chain.set(chain_length)
        self._bits.set(snapshot.bits)
        self._snapshot_bytes.set(snapshot.bytes)

    def published(self, sequence: int, step: int, *, full: bool) -> None:
        """Report a published delta."""
        self._published_sequence.set(sequence)
        self._published_step.set(step)
        self._deltas.labels("full" if full else "delta").inc()

    def store_failed(self, error: DLRMError) -> None:
        """Report that the last store call failed."""
        self._update(store_error=str(error)[:STORE_ERROR_LENGTH])
        self._failing.set(1)
        self.store_errors.inc()

    def store_answered(self) -> None:
        """Report that the last store call succeeded."""
        if self.progress.store_error:
            self._update(store_error="")
            self._failing.set(0)

    def store_retried(self, reason: RetryReason) -> None:
        """Count a retry of a store call."""
        self._store_repeats.labels(reason).inc()

    def ended(self, reason: str) -> None:
        """Report why the sidecar is about to exit."""
        self._update(reason=reason)


STOP_POLL_S = 0.05


class Endpoint:
    """Serve GET /progress and /metrics on threads of its own.

    Raises:
        UsageError: the address is in use.
    """

    def __init__(self, bind: str, port: int, status: Status) -> None:
        class Handler(EndpointHandler):
            def do_GET(self) -> None:
                if self.path == "/progress":
                    self.answer(200, status.progress.model_dump_json().encode(), "application/json")
                elif self.path == "/metrics":
                    self.answer(200, generate_latest(status.registry), CONTENT_TYPE_LATEST)
                else:
                    self.answer(404, b"GET /progress or /metrics\n", "text/plain")

        try:
            self._server = EndpointServer((bind, port), Handler)
        except OSError as error:
            raise UsageError(f"cannot listen on {bind}:{port}: {error.strerror}; choose another port") from error
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(STOP_POLL_S,), name="endpoint", daemon=True
        )
        self._thread.start()

    @property
    def port(self) -> int:
        """Return the port that it listens on."""
        return self._server.server_port

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
