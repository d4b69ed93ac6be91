"""Which of a job's pods someone means."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dlrm_api.errors import NoInputError, UsageError
from dlrm_cli.cluster.facts import JobFacts, Object, containers, dig, pod_attempt, pod_index


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
