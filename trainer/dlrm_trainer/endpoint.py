"""Serve ``/progress``, ``/metrics``, ``/stacks`` and ``POST /cut`` of one pod over HTTP."""

from __future__ import annotations

import contextlib
import faulthandler
import hmac
import json
import mmap
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any

import numpy as np
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dlrm_api.errors import TemporaryError
from dlrm_api.names import TOKEN_HEADER, token_digest
from dlrm_api.process import EndpointHandler, EndpointServer
from dlrm_api.progress import Progress, TrainerPhase
from dlrm_trainer.checkpointing.control import CutControl
from dlrm_trainer.metrics.progress import ProgressBoard

CUT_WAIT_S = 5.0
"""How long ``POST /cut`` waits for the cut before it answers with the first step that can follow."""
MAX_BODY_BYTES = 4_096
STACKS_SIGNAL = signal.SIGUSR1
"""Makes a rank write its stacks from the signal handler if its thread does not answer."""
ANSWER_S = 1.0
STOP_POLL_S = 0.05
"""A trainer that ends waits for this at most."""
QUIET_S = 0.02
"""A dump that has not grown for this long is complete."""
MAX_DUMP_BYTES = 65_536
"""Largest dump of one rank."""


class RankStacks:
    """Dump all threads' stacks of a pod's ranks, even if a rank's main thread hangs or keeps the GIL.

    Create it before the ranks are forked: they share its files and pipes.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        self._ranks = tuple(ranks)
        self._files = [_nameless_file() for _ in ranks]
        self._pipes = [os.pipe() for _ in ranks]
        self._pids = np.frombuffer(mmap.mmap(-1, 8 * len(ranks)), np.int64)
        self._lock = threading.Lock()

    def answer(self, rank: int) -> None:
        """Let this process answer for ``rank`` from now on."""
        place = self._ranks.index(rank)
        file, requests = self._files[place], self._pipes[place][0]
        faulthandler.register(STACKS_SIGNAL, file=file, all_threads=True)

        def listen() -> None:
            while os.read(requests, 1):
                faulthandler.dump_traceback(file=file, all_threads=True)

        threading.Thread(target=listen, name="dlrm-stacks", daemon=True).start()
        self._pids[place] = os.getpid()

    def dump(self) -> bytes:
        """Return the stacks of all ranks of the pod, each under its number, within a few seconds."""
        with self._lock:
            places = range(len(self._ranks))
            for place in places:
                os.ftruncate(self._files[place], 0)
                os.lseek(self._files[place], 0, os.SEEK_SET)
                os.write(self._pipes[place][1], b"?")
            self._await(places)
            silent = [place for place in places if not self._size(place)]
            for place in silent:
                if self._pids[place]:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(int(self._pids[place]), STACKS_SIGNAL)
            self._await(silent)
            return b"".join(self._said(place) for place in places)

    def _await(self, places: Sequence[int]) -> None:
        """Wait until all dumps are complete or the time is over."""
        deadline, before = time.monotonic() + ANSWER_S, [0]
        while time.monotonic() < deadline:
            sizes = [self._size(place) for place in places]
            if all(sizes) and sizes == before:
                return
            before = sizes
            time.sleep(QUIET_S)

    def _size(self, place: int) -> int:
        return os.fstat(self._files[place]).st_size

    def _said(self, place: int) -> bytes:
        text = os.pread(self._files[place], MAX_DUMP_BYTES, 0) or b"it says nothing\n"
        return f"rank {self._ranks[place]}, process {self._pids[place]}\n".encode() + text + b"\n"


def _nameless_file() -> int:
    descriptor, path = tempfile.mkstemp()
    Path(path).unlink()
    return descriptor


class Endpoint:
    """Serve one pod's progress from a background thread until closed.

    ``token_sha256`` is the digest of the token that ``POST /cut`` must send (``dlrm_api.names``); None: cuts are
    refused. ``collectors`` are of further metrics, and ``stacks`` makes the content of ``/stacks``. Raises
    TemporaryError if the port is in use.
    """

    def __init__(
        self,
        address: str,
        port: int,
        board: ProgressBoard,
        control: CutControl,
        token_sha256: str | None,
        collectors: Sequence[Collector],
        stacks: Callable[[], bytes],
    ) -> None:
        self.board, self.control, self.token_sha256, self.stacks = board, control, token_sha256, stacks
        self.registry = CollectorRegistry()
        for collector in (TrainerMetrics(board, control), *collectors):
            self.registry.register(collector)
        try:
            self._server = EndpointServer((address, port), _handler(self))
        except OSError as error:
            raise TemporaryError(
                f"cannot listen on {address}:{port} for the progress endpoint: {error.strerror}; free the port"
            ) from error
        self.port = int(self._server.server_address[1])
        threading.Thread(
            target=self._server.serve_forever, args=(STOP_POLL_S,), name="dlrm-endpoint", daemon=True
        ).start()

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()

    def allows(self, token: str | None) -> bool:
        """Return whether a token permits requests for cuts."""
        if token is None or self.token_sha256 is None:
            return False
        return hmac.compare_digest(token_digest(token), self.token_sha256)

    def cut(self) -> tuple[HTTPStatus, dict[str, Any]]:
        """Request a cut; return its step if it is handed over in time, else the first step it can have."""
        now = self.board.now
        if not self.control.takes_cuts:
            return HTTPStatus.CONFLICT, {"error": "this run takes no checkpoints: no hand-off directory is configured"}
        if (done := self.control.wait_for(now.step, 0.0)) is not None:
            return HTTPStatus.OK, {"step": done}
        if now.phase in (TrainerPhase.FINISHING, TrainerPhase.DONE):
            # The final cut follows without a request.
            return HTTPStatus.ACCEPTED, {"step": now.step}
        self.control.ask(now.step)
        step = self.control.wait_for(now.step, CUT_WAIT_S)
        return (HTTPStatus.ACCEPTED, {"step": now.step + 1}) if step is None else (HTTPStatus.OK, {"step": step})


UNCOUNTED = frozenset({TrainerPhase.STARTING, TrainerPhase.RESTORING})
"""Phases before the restored step is known: a counter of 0 would turn the restored samples into a rate."""
Reading = Callable[[Progress, CutControl], float | None]


def _of_evaluation(name: str) -> Reading:
    return lambda now, _: getattr(now.evaluation, name, None)


COUNTERS: tuple[tuple[str, str, Reading], ...] = (
    ("steps", "Steps completed by the job.", lambda now, _: now.step if now.phase not in UNCOUNTED else None),
    ("samples", "Samples trained by the job.", lambda now, _: now.samples if now.phase not in UNCOUNTED else None),
    (
        "skipped_rows",
        "Bad rows that the job left out (data.badRows).",
        lambda now, _: now.skipped_rows if now.phase not in UNCOUNTED else None,
    ),
    (
        "truncated_rows",
        "Rows with a bag that was shortened to maxLookups.",
        lambda now, _: now.truncated_rows if now.phase not in UNCOUNTED else None,
    ),
    ("cut_delays", "Cuts that waited for the previous one.", lambda _, control: control.delays),
    (
        "cuts_early",
        "Cuts made early because changed rows had nearly filled a rank's share of the hand-off budget.",
        lambda _, control: control.early_cuts,
    ),
    (
        "cut_wait_seconds",
        "Time that training waited for the checkpointer to free space for cuts above the hand-off budget.",
        lambda _, control: control.waited_s,
    ),
    ("cuts_abandoned", "Cuts withdrawn because that space was not freed in time.", lambda _, c: c.abandoned_cuts),
)
GAUGES: tuple[tuple[str, str, Reading], ...] = (
    ("world_size_ranks", "Ranks.", lambda now, _: now.world_size),
    ("samples_per_second", "Throughput over the last steps.", lambda now, _: now.samples_per_second),
    ("loss_nats", "Mean log loss of the last step.", lambda now, _: now.loss),
    ("last_step_timestamp_seconds", "When the last step ended.", lambda now, _: now.time),
    ("last_cut_step", "Step of the newest cut handed over.", lambda now, _: now.last_cut_step),
    ("restored_step", "Step of the snapshot that this attempt started from.", lambda now, _: now.restored_step),
    (
        "passed_over_snapshots",
        "Newer snapshots that this attempt could not use when it started.",
        lambda now, _: now.passed_over_snapshots,
    ),
    (
        "maintenance_period_steps",
        "Steps between two maintenances of unique tables; absent without such tables.",
        lambda now, _: now.maintenance_steps,
    ),
    ("eval_log_loss_nats", "Log loss of the last evaluation.", _of_evaluation("log_loss")),
    ("eval_normalized_entropy_ratio", "Normalized entropy of the last evaluation.", _of_evaluation("ne")),
    ("eval_auc_ratio", "Area under the ROC curve of the last evaluation.", _of_evaluation("auc")),
)


class TrainerMetrics(Collector):
    """Collect metrics from the progress board when they are scraped."""

    def __init__(self, board: ProgressBoard, control: CutControl) -> None:
        self._board, self._control = board, control

    @staticmethod
    def describe() -> list[Metric]:
        """Return every metric without its value."""
        counters = [CounterMetricFamily(f"dlrm_trainer_{name}", text) for name, text, _ in COUNTERS]
        return [*counters, *(GaugeMetricFamily(f"dlrm_trainer_{name}", text) for name, text, _ in GAUGES)]

    def collect(self) -> Iterator[Metric]:
        """Return every metric that has a value."""
        now = self._board.now
        for family, (_, _, reading) in zip(self.describe(), (*COUNTERS, *GAUGES), strict=True):
            if (value := reading(now, self._control)) is not None:
                family.add_metric([], value)  # type: ignore[attr-defined]
                yield family


def _handler(endpoint: Endpoint) -> type[EndpointHandler]:
    class Handler(EndpointHandler):
        def do_GET(self) -> None:
            if self.path == "/progress":
                self.answer(HTTPStatus.OK, endpoint.board.now.model_dump_json().encode(), "application/json")
            elif self.path == "/metrics":
                self.answer(HTTPStatus.OK, generate_latest(endpoint.registry), CONTENT_TYPE_LATEST)
            elif self.path == "/stacks":
                self.answer(HTTPStatus.OK, endpoint.stacks(), "text/plain")
            else:
                self._refuse(HTTPStatus.NOT_FOUND, "not found; use GET /progress, /metrics or /stacks, or POST /cut")

        def do_POST(self) -> None:
            length = self.headers.get("Content-Length", "")
            self.rfile.read(min(int(length) if length.isdigit() else 0, MAX_BODY_BYTES))
            if self.path != "/cut":
                self._refuse(HTTPStatus.NOT_FOUND, "not found; use POST /cut")
            elif not endpoint.allows(self.headers.get(TOKEN_HEADER)):
                self._refuse(HTTPStatus.FORBIDDEN, f"invalid {TOKEN_HEADER}: expected this attempt's token")
            else:
                status, answer = endpoint.cut()
                self.answer(status, json.dumps(answer).encode(), "application/json")

        def _refuse(self, status: HTTPStatus, problem: str) -> None:
            self.answer(status, json.dumps({"error": problem}).encode(), "application/json")

    return Handler
