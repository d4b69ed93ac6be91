"""``dlrmctl logs``: print the logs of a job's pods, or follow them across restarts."""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from dlrm_api.errors import DLRMError, NoInputError, TemporaryError, UsageError, visible
from dlrm_cli.cluster.client import JobClient, Object, dig
from dlrm_cli.cluster.describe import waits_for
from dlrm_cli.cluster.get import JobFacts, containers, job_facts, pod_attempt, pod_index
from dlrm_cli.views import print_stderr


@dataclass(frozen=True, kw_only=True)
class PodChoice:
    """Choose pods of a job; by default pod 0 of the newest attempt."""

    replica: int | None = None
    rank: int | None = None
    everyone: bool = False
    attempt: int | None = None


def check_choice(job: JobFacts, choice: PodChoice) -> None:
    """Refuse two choices at once, and a replica or rank beyond the plan, with a UsageError."""
    if (choice.replica is not None) + (choice.rank is not None) + choice.everyone > 1:
        raise UsageError("--replica, --rank and --all cannot be combined")
    replica = wanted_replica(job, choice)
    if job.nodes is not None and replica is not None and replica >= job.nodes:
        option, given, last = (
            ("--replica", choice.replica, job.nodes - 1)
            if choice.rank is None
            else ("--rank", choice.rank, job.nodes * job.processes - 1)
        )
        raise UsageError(f"invalid {option}: expected 0 to {last} for {job.name}, got {given}")


def wanted_replica(job: JobFacts, choice: PodChoice) -> int | None:
    """Return the index of the chosen pod; None for all of them."""
    if choice.everyone:
        return None
    return choice.rank // job.processes if choice.rank is not None else choice.replica or 0


def choose_pods(job: JobFacts, pods: Sequence[Object], choice: PodChoice) -> list[Object]:
    """Return the chosen pods that exist, by index."""
    newest = max(map(pod_attempt, pods), default=None)
    attempt = choice.attempt if choice.attempt is not None else newest
    replica = wanted_replica(job, choice)
    found = [pod for pod in pods if pod_attempt(pod) == attempt and replica in (None, pod_index(pod))]
    return sorted(found, key=pod_index)


def no_such_pod(job: JobFacts, pods: Sequence[Object], choice: PodChoice) -> NoInputError:
    """Return the error for a missing pod."""
    attempts = sorted({pod_attempt(pod) for pod in pods})
    if choice.attempt is not None and attempts and choice.attempt not in attempts:
        found = ", ".join(map(str, attempts))
        return NoInputError(
            f"pods of attempt {choice.attempt} not found (found attempts: {found}); to keep failed pods, set "
            "spec.lifecycle.keepFailedPods"
        )
    why = f" ({job.reason})" if job.reason else ""
    return NoInputError(f"pod not found: {job.name} is {job.phase}{why}; see dlrmctl describe {job.name}")


def has_log(pod: Object, container: str) -> bool:
    """Return whether the container runs or ran, so that it has a log."""
    seen = next((each for each in containers(pod) if each.get("name") == container), {})
    return bool(dig(seen, "state", "running") is not None or dig(seen, "state", "terminated"))


POLL_INTERVAL_S = 1.0
MAX_QUEUED_LINES = 1_000
ENDED = frozenset({"Succeeded", "Failed", "Suspended"})


@dataclass(frozen=True, kw_only=True)
class LogOptions:
    """Hold the options of ``dlrmctl logs``."""

    choice: PodChoice
    container: str
    previous: bool = False
    timestamps: bool = False
    tail: int | None = None
    since_s: int | None = None

    def query(self) -> dict[str, str]:
        """Return the query parameters of a log that is read once."""
        flags = {"previous": self.previous, "timestamps": self.timestamps}
        given = {"container": self.container, "tailLines": self.tail, "sinceSeconds": self.since_s}
        given |= {name: "true" for name, wanted in flags.items() if wanted}
        return {name: str(value) for name, value in given.items() if value is not None}


def print_logs(client: JobClient, name: str, options: LogOptions) -> None:
    """Print the logs unchanged; NoInputError for an unknown job or pod, or one without a log."""
    job, pods = _read(client, name, options)
    chosen = choose_pods(job, pods, options.choice)
    if not chosen:
        raise no_such_pod(job, pods, options.choice)
    problem: DLRMError | None = None
    for pod in chosen:
        prefix = _prefix(pod, options)
        try:
            for line in client.log(dig(pod, "metadata", "name"), options.query()):
                sys.stdout.write(prefix + _text(line))
        except DLRMError as error:
            if isinstance(error, NoInputError) and (reason := waits_for(pod)):
                error = NoInputError(f"{error}; the pod waits: {reason}")
            if len(chosen) == 1:
                raise error from None
            print_stderr(f"{prefix}{error}")
            problem = error
    if problem is not None:
        raise problem


def follow_logs(client: JobClient, name: str, options: LogOptions) -> None:
    """Print lines as they come, of one attempt after the other, until the job has ended or is suspended."""
    lines: queue.Queue[str] = queue.Queue(MAX_QUEUED_LINES)
    tails: dict[str, _Tail] = {}
    shown, first = "", True
    while True:
        try:
            job, pods = _read(client, name, options)
        except TemporaryError as error:
            if first:
                raise
            shown = _print_once(str(error), shown)
            _print_for(lines, POLL_INTERVAL_S)
            continue
        first = False
        for pod in choose_pods(job, pods, options.choice):
            uid = str(dig(pod, "metadata", "uid"))
            if uid not in tails and has_log(pod, options.container):
                tails[uid] = _Tail(client, pod, options, lines)
        alive = any(tail.alive for tail in tails.values())
        if not alive:
            _print_for(lines, 0)
            if job.phase in ENDED:
                return
            shown = _print_once(f"{job.name} is {job.phase}{': ' + job.reason if job.reason else ''}; waiting", shown)
        _print_for(lines, POLL_INTERVAL_S)


class _Tail:
    """Follow one container's log in a thread; a broken stream continues after the last line."""

    def __init__(self, client: JobClient, pod: Object, options: LogOptions, lines: queue.Queue[str]) -> None:
        self._client, self._options, self._lines = client, options, lines
        self._pod = str(dig(pod, "metadata", "name"))
        self._prefix = _prefix(pod, options)
        self._last = ""
        self._thread = threading.Thread(target=self._run, name=f"log of {self._pod}", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Return whether more lines may come."""
        return self._thread.is_alive()

    def _run(self) -> None:
        while True:
            try:
                for line in self._client.log(self._pod, self._query()):
                    time_, _, text = _text(line).partition(" ")
                    if time_ > self._last:
                        self._last = time_
                        self._lines.put(self._prefix + (f"{time_} {text}" if self._options.timestamps else text))
            except TemporaryError:
                time.sleep(POLL_INTERVAL_S)
            except DLRMError as error:
                print_stderr(f"{self._prefix}{error}")
                return
            else:
                return

    def _query(self) -> dict[str, str]:
        """Ask for times too: they say which lines were printed before the stream broke."""
        found = {**self._options.query(), "follow": "true", "timestamps": "true"}
        if self._last:
            found.pop("tailLines", None)
            found.pop("sinceSeconds", None)
            found["sinceTime"] = self._last
        return found


def _read(client: JobClient, name: str, options: LogOptions) -> tuple[JobFacts, list[Object]]:
    job = job_facts(client.job(name))
    check_choice(job, options.choice)
    return job, client.pods(name)


def _print_for(lines: queue.Queue[str], seconds: float) -> None:
    """Print all queued lines, and those that come within so many seconds."""
    end = time.monotonic() + seconds
    with contextlib.suppress(queue.Empty):
        while True:
            if lines.empty():
                sys.stdout.flush()
            sys.stdout.write(lines.get(timeout=max(0.0, end - time.monotonic())))


def _print_once(text: str, shown: str) -> str:
    if text != shown:
        print_stderr(text)
    return text


def _prefix(pod: Object, options: LogOptions) -> str:
    return f"{dig(pod, 'metadata', 'name')} | " if options.choice.everyone else ""


def _text(line: bytes) -> str:
    """Return a line as shown: on a terminal without control characters, elsewhere unchanged."""
    text = line.decode(errors="replace")
    text = visible(text) if sys.stdout.isatty() else text
    return text if text.endswith("\n") else text + "\n"
