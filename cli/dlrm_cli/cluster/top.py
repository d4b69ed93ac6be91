"""``dlrmctl top``: how jobs train now, asked of their pods through the API server's proxy every two seconds."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime

from rich.console import Group
from rich.live import Live
from rich.text import Text

from dlrm_api.errors import DLRMError, TemporaryError
from dlrm_api.names import Port, trainer_pod
from dlrm_cli.cluster.connection import Connection
from dlrm_cli.cluster.facts import Object, dig, job_facts
from dlrm_cli.cluster.figures import PodFigures, pod_figures
from dlrm_cli.cluster.grid import print_lines
from dlrm_cli.cluster.listing import one_line
from dlrm_cli.cluster.pod_choice import Choice, chosen_pods
from dlrm_cli.cluster.top_views import Look, job_lines, jobs_lines
from dlrm_cli.terminal import SafeConsole

EVERY_S = 2.0
TIMEOUT_S = 2.0
PARALLEL = 8
MOST_ASKED = 64
"""Pods asked in one round; of the others the status alone speaks."""
AWAY = "not up to date: "

Place = tuple[str, str]
"""Namespace and name of a pod."""


class Top:
    """Looks at all jobs, or at one; remembers the last look at each pod, for rates."""

    def __init__(self, connection: Connection, name: str | None, *, everywhere: bool) -> None:
        self._connection, self._name, self._everywhere = connection, name, everywhere
        self._before: dict[Place, PodFigures] = {}

    def lines(self) -> list[Text]:
        """The table as of now.

        Raises:
            NoInputError: there is no such job.
            NoPermissionError: the user may not look at jobs, or at the job's pods.
        """
        return self._all_jobs() if self._name is None else self._one_job(self._name)

    def _one_job(self, name: str) -> list[Text]:
        job = job_facts(self._connection.job(name))
        pods = chosen_pods(job, self._connection.pods(name), Choice(everyone=True))
        places = [(job.namespace, str(dig(pod, "metadata", "name"))) for pod in pods]
        looks = self._looks([place for place, pod in zip(places, pods, strict=True) if _runs(pod)])
        seen = [(pod, looks.get(place, Look())) for place, pod in zip(places, pods, strict=True)]
        return job_lines(job, seen, datetime.now(UTC))

    def _all_jobs(self) -> list[Text]:
        jobs = [job_facts(job) for job in self._connection.jobs(everywhere=self._everywhere)[0]]
        places = [(job.namespace, trainer_pod(job.name, job.attempt, 0)) for job in jobs]
        looks = self._looks([place for place, job in zip(places, jobs, strict=True) if job.phase == "Running"])
        seen = [(job, looks.get(place, Look())) for place, job in zip(places, jobs, strict=True) if not job.finished]
        return jobs_lines(seen, datetime.now(UTC), everywhere=self._everywhere)

    def _looks(self, places: Sequence[Place]) -> dict[Place, Look]:
        """Ask pods all at once."""
        asked = places[:MOST_ASKED]
        with ThreadPoolExecutor(PARALLEL, thread_name_prefix="metrics") as threads:
            looks = dict(zip(asked, threads.map(self._look, asked), strict=True))
        self._before = {place: look.now for place, look in looks.items() if look.now is not None}
        return looks

    def _look(self, place: Place) -> Look:
        namespace, pod = place
        try:
            text = self._connection.pod_endpoint(pod, namespace, Port.TRAINER, "metrics", TIMEOUT_S)
            return Look(now=pod_figures(text), before=self._before.get(place))
        except DLRMError as error:
            return Look(problem=one_line(str(error)))


def show_top(connection: Connection, name: str | None, *, everywhere: bool, once: bool) -> None:
    """Print the table once; or live on a terminal, and one after the other elsewhere, until interrupted.

    Raises:
        DLRMError: the first look failed; later ones are told and tried again.
    """
    top = Top(connection, name, everywhere=everywhere)
    lines = top.lines()
    if once:
        print_lines(lines)
        return
    console = SafeConsole(highlight=False)
    if not console.is_terminal:
        while True:
            print_lines([*lines, Text("")])
            time.sleep(EVERY_S)
            lines = _again(top, lines)
    with Live(_screen(lines), console=console, auto_refresh=False, screen=True) as live:
        while True:
            live.update(_screen(lines), refresh=True)
            time.sleep(EVERY_S)
            lines = _again(top, lines)


def _screen(lines: Sequence[Text]) -> Group:
    """The lines, cut at the terminal's edge: wrapped rows are no table."""
    for text in lines:
        text.no_wrap, text.overflow = True, "ellipsis"
    return Group(*lines)


def _again(top: Top, lines: list[Text]) -> list[Text]:
    """The next look; where the API server is away, the last one and why."""
    try:
        return top.lines()
    except TemporaryError as error:
        told = [text for text in lines if not text.plain.startswith(AWAY)]
        return [*told, Text(f"{AWAY}{error}")]


def _runs(pod: Object) -> bool:
    return dig(pod, "status", "phase") == "Running" and not dig(pod, "metadata", "deletionTimestamp")
