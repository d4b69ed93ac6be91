"""``dlrmctl logs``: what containers of a job's pods wrote; followed over restarts of the gang."""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dlrm_api.errors import DLRMError, NoInputError, TemporaryError, UsageError, visible
from dlrm_cli.cluster.client import Connection, Object, dig
from dlrm_cli.cluster.get import JobFacts, containers, job_facts, pod_attempt, pod_index
from dlrm_cli.views import tell


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Pod 0 of the newest attempt, unless something else is said."""

    replica: int | None = None
    rank: int | None = None
    everyone: bool = False
    attempt: int | None = None


def check_choice(job: JobFacts, choice: Choice) -> None:
    """Refuse what no attempt of the job can have.

    Raises:
        UsageError: two choices in one, or a replica or rank beyond the plan.
    """
    given = [choice.replica is not None, choice.rank is not None, choice.everyone]
    if sum(given) > 1:
        raise UsageError("--replica, --rank and --all are three ways to choose pods: give one of them")
    replica = wanted_replica(job, choice)
    if job.nodes is not None and replica is not None and replica >= job.nodes:
        what = "--replica" if choice.rank is None else f"--rank {choice.rank}: replica"
        ranks = f", ranks 0 to {job.nodes * job.processes - 1}" if choice.rank is not None else ""
        raise UsageError(f"{what} {replica}: {job.name} has replicas 0 to {job.nodes - 1}{ranks}")


def wanted_replica(job: JobFacts, choice: Choice) -> int | None:
    """Index of the pod that is meant; None for all of them."""
    if choice.everyone:
        return None
    return choice.rank // job.processes if choice.rank is not None else choice.replica or 0


def chosen_pods(job: JobFacts, pods: Sequence[Object], choice: Choice) -> list[Object]:
    """The pods that are meant and are there, in order of their index."""
    there = sorted({pod_attempt(pod) for pod in pods})
    attempt = choice.attempt if choice.attempt is not None else (there[-1] if there else None)
    replica = wanted_replica(job, choice)
    found = [pod for pod in pods if pod_attempt(pod) == attempt and replica in (None, pod_index(pod))]
    return sorted(found, key=pod_index)


def none_there(job: JobFacts, pods: Sequence[Object], choice: Choice) -> NoInputError:
    """Why there is no such pod."""
    there = sorted({pod_attempt(pod) for pod in pods})
    if choice.attempt is not None and there and choice.attempt not in there:
        attempts = ", ".join(map(str, there))
        return NoInputError(
            f"no pod of attempt {choice.attempt} is left (there are those of {attempts}): failed pods stay with "
            "spec.lifecycle.keepFailedPods"
        )
    why = f": {job.reason}" if job.reason else ""
    return NoInputError(f"{job.name} is {job.phase} and has no such pod{why}; dlrmctl describe {job.name} says more")


def has_log(pod: Object, container: str) -> bool:
    """Whether the container runs or ran, so that there is a log of it."""
    seen = next((each for each in containers(pod) if each.get("name") == container), {})
    return bool(dig(seen, "state", "running") is not None or dig(seen, "state", "terminated"))


LOOK_EVERY_S = 1.0
QUEUED_LINES = 1_000
ENDED = frozenset({"Succeeded", "Failed", "Suspended"})


@dataclass(frozen=True, kw_only=True)
class LogOptions:
    """What is asked for."""

    choice: Choice
    container: str
    previous: bool = False
    timestamps: bool = False
    tail: int | None = None
    since_s: int | None = None

    def query(self) -> dict[str, str]:
        """Parameters of a log that is read once."""
        found = {"container": self.container}
        if self.previous:
            found["previous"] = "true"
        if self.timestamps:
            found["timestamps"] = "true"
        if self.tail is not None:
            found["tailLines"] = str(self.tail)
        if self.since_s is not None:
            found["sinceSeconds"] = str(self.since_s)
        return found


def print_logs(connection: Connection, name: str, options: LogOptions) -> None:
    """Print what is there.

    Raises:
        NoInputError: there is no such job, pod, or log.
        UsageError: no attempt of the job can have that pod.
    """
    job, pods = _look(connection, name, options)
    chosen = chosen_pods(job, pods, options.choice)
    if not chosen:
        raise none_there(job, pods, options.choice)
    problem: DLRMError | None = None
    for pod in chosen:
        prefix = _prefix(pod, options)
        try:
            for line in connection.log(dig(pod, "metadata", "name"), options.query(), None):
                sys.stdout.write(prefix + _text(line))
        except DLRMError as error:
            if len(chosen) == 1:
                raise
            tell(f"{prefix}{error}")
            problem = error
    if problem is not None:
        raise problem


def follow_logs(connection: Connection, name: str, options: LogOptions) -> None:
    """Print lines as they come, of one gang after the other, until the job has ended or is suspended.

    Raises:
        NoInputError: there is no such job.
        UsageError: no attempt of the job can have that pod.
    """
    lines: queue.Queue[str] = queue.Queue(QUEUED_LINES)
    tails: dict[str, _Tail] = {}
    said, first = "", True
    while True:
        try:
            job, pods = _look(connection, name, options)
        except TemporaryError as error:
            if first:
                raise
            said = _say_once(str(error), said)
            _print_for(lines, LOOK_EVERY_S)
            continue
        first = False
        for pod in chosen_pods(job, pods, options.choice):
            uid = str(dig(pod, "metadata", "uid"))
            if uid not in tails and has_log(pod, options.container):
                tails[uid] = _Tail(connection, pod, options, lines)
        alive = any(tail.alive for tail in tails.values())
        if not alive:
            _print_for(lines, 0)
            if job.phase in ENDED:
                return
            said = _say_once(f"{job.name} is {job.phase}{': ' + job.reason if job.reason else ''}; waiting", said)
        _print_for(lines, LOOK_EVERY_S)


class _Tail:
    """One container's log in a thread of its own; a stream that breaks is taken up after the last line."""

    def __init__(self, connection: Connection, pod: Object, options: LogOptions, lines: queue.Queue[str]) -> None:
        self._connection, self._options, self._lines = connection, options, lines
        self._pod = str(dig(pod, "metadata", "name"))
        self._prefix = _prefix(pod, options)
        self._last = ""
        self._thread = threading.Thread(target=self._run, name=f"log of {self._pod}", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether more may come."""
        return self._thread.is_alive()

    def _run(self) -> None:
        while True:
            try:
                for line in self._connection.log(self._pod, self._query(), None):
                    time_, _, text = _text(line).partition(" ")
                    if time_ > self._last:
                        self._last = time_
                        self._lines.put(self._prefix + (f"{time_} {text}" if self._options.timestamps else text))
            except TemporaryError:
                time.sleep(LOOK_EVERY_S)
            except DLRMError as error:
                tell(f"{self._prefix}{error}")
                return
            else:
                return

    def _query(self) -> dict[str, str]:
        """With times, which tell what was printed before the stream broke."""
        found = {**self._options.query(), "follow": "true", "timestamps": "true"}
        if self._last:
            found.pop("tailLines", None)
            found.pop("sinceSeconds", None)
            found["sinceTime"] = self._last
        return found


def _look(connection: Connection, name: str, options: LogOptions) -> tuple[JobFacts, list[Object]]:
    job = job_facts(connection.job(name))
    check_choice(job, options.choice)
    return job, connection.pods(name)


def _print_for(lines: queue.Queue[str], seconds: float) -> None:
    """Print lines that come within so many seconds, and all that are there already."""
    for line in _lines_until(lines, time.monotonic() + seconds):
        sys.stdout.write(line)
    sys.stdout.flush()


def _lines_until(lines: queue.Queue[str], end: float) -> Iterator[str]:
    while True:
        if lines.empty():
            sys.stdout.flush()
        try:
            yield lines.get(timeout=max(0.0, end - time.monotonic()))
        except queue.Empty:
            return


def _say_once(words: str, said: str) -> str:
    if words != said:
        tell(words)
    return words


def _prefix(pod: Object, options: LogOptions) -> str:
    return f"{dig(pod, 'metadata', 'name')} | " if options.choice.everyone else ""


def _text(line: bytes) -> str:
    """A line as it is shown: on a terminal it can't steer that, elsewhere it is what the container wrote."""
    text = line.decode(errors="replace")
    text = visible(text) if sys.stdout.isatty() else text
    return text if text.endswith("\n") else text + "\n"
