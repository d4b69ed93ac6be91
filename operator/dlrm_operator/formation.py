"""How a gang comes about: planned once, its objects written, its pods created, then watched."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime

from dlrm_api.errors import InvalidSpecError
from dlrm_api.job import DLRMJob
from dlrm_api.plan import Plan
from dlrm_api.status import ConditionType, DLRMJobStatus, Phase
from dlrm_operator.absorbing import plan_status
from dlrm_operator.actions import (
    Action,
    ApplyConfigMap,
    ApplySecret,
    ApplyService,
    CreatePod,
    DeleteObject,
    Manifest,
    PlanQuestion,
    RequestPlan,
    WakeAt,
)
from dlrm_operator.gang import Gang, current_gang
from dlrm_operator.manifests import Owner, gang_service, plan_config_maps, token_secret
from dlrm_operator.observed import Children, ConfigMapSeen, Observed
from dlrm_operator.phases import in_phase, of_whole_gang, with_truth
from dlrm_operator.pods import Attempt, trainer_pods


@dataclass(frozen=True, kw_only=True)
class Formation:
    """A step towards the gang; ``fatal`` says why there can never be one."""

    status: DLRMJobStatus
    actions: tuple[Action, ...] = ()
    fatal_reason: str = ""
    fatal: str = ""


def form_gang(observed: Observed, job: DLRMJob, status: DLRMJobStatus, now: datetime) -> Formation:
    """Bring the attempt's gang about, or say how the whole gang fares. No pod of another attempt is there."""
    gang = current_gang(observed, status)
    if gang.whole and gang.size is not None:
        return Formation(status=of_whole_gang(status, gang, now))
    if observed.children is None:
        return Formation(status=status, actions=(WakeAt(key=observed.job.key, time=now),))
    plan = observed.children.plan(status.attempt)
    if plan is not None:
        return _create(observed, job, plan, status, now)
    return _plan(observed, job, observed.children, status, now)


def _plan(observed: Observed, job: DLRMJob, children: Children, status: DLRMJobStatus, now: datetime) -> Formation:
    """Get a plan, and write it down before anything relies on it."""
    planning = observed.planning
    if observed.profile_problem:
        words = observed.profile_problem
        status = with_truth(status, ConditionType.PLANNED, "False", "HardwareProfile", words, now=now)
        return Formation(status=in_phase(status, Phase.PENDING))
    if planning is None and observed.trace_problem:
        words = observed.trace_problem
        status = with_truth(status, ConditionType.PLANNED, "False", "Trace", words, now=now)
        return Formation(status=in_phase(status, Phase.PENDING))
    phase = Phase.RESTARTING if status.restarts else Phase.PLANNING
    status = in_phase(status, phase)
    if planning is None:
        status = with_truth(status, ConditionType.PLANNED, "False", "Planning", now=now)
        return Formation(status=status, actions=(_question(observed, job),))
    if planning.plan is None:
        reason = "Infeasible" if planning.final else "PlannerFailed"
        status = with_truth(status, ConditionType.PLANNED, "False", reason, planning.problem, now=now)
        fatal = planning.problem if planning.final else ""
        return Formation(status=status, fatal_reason=reason, fatal=fatal)
    try:
        maps = plan_config_maps(job, status.attempt, planning.plan, Owner.of(observed.job))
    except InvalidSpecError as error:
        return Formation(status=status, fatal_reason="InvalidSpec", fatal=str(error))
    written = _planned(status, planning.plan, now)
    actions = _config_map_actions(observed, children, status.attempt, maps)
    again = WakeAt(key=observed.job.key, time=now)  # nothing watches ConfigMaps
    return Formation(status=written, actions=(*actions, again))


def _question(observed: Observed, job: DLRMJob) -> RequestPlan:
    question = PlanQuestion(
        uid=observed.job.uid,
        generation=observed.job.generation,
        profile_version=observed.profile_version,
        job=job,
        profile=observed.profile,
        traces=observed.traces,
    )
    return RequestPlan(key=observed.job.key, question=question)


def _config_map_actions(
    observed: Observed, children: Children, attempt: int, wanted: list[Manifest]
) -> Iterator[Action]:
    """Write the plan's ConfigMaps; an immutable one that a crash left of another plan makes room first."""
    names = {manifest["metadata"]["name"]: manifest for manifest in wanted}
    for seen in children.config_maps:
        if seen.attempt == attempt and not _holds(seen, names.get(seen.name)):
            yield DeleteObject(kind="ConfigMap", key=observed.job.key, name=seen.name, uid=seen.uid)
    for manifest in wanted:
        yield ApplyConfigMap(manifest=manifest)


def _holds(seen: ConfigMapSeen, wanted: Manifest | None) -> bool:
    """Whether an existing ConfigMap is the wanted one; part names carry the plan's digest."""
    if wanted is None:
        return False
    return set(seen.parts) == set(wanted.get("binaryData", {})) and dict(seen.text) == wanted.get("data", {})


def _create(observed: Observed, job: DLRMJob, plan: Plan, status: DLRMJobStatus, now: datetime) -> Formation:
    """Create what lacks: the token, the Service, then pods; once all are there, the gang is whole."""
    children = observed.children
    assert children is not None, "asked for before"
    status = _planned(status, plan, now)
    gang = current_gang(observed, status)
    if gang.complete:
        status = of_whole_gang(status.model_copy(update={"gang_attempt": status.attempt}), gang, now)
        return Formation(status=status, actions=tuple(_outdated(observed, children, status.attempt)))
    if observed.profile_problem:
        words = observed.profile_problem
        status = with_truth(status, ConditionType.SCHEDULED, "False", "HardwareProfile", words, now=now)
        return Formation(status=in_phase(status, Phase.PENDING))
    reason, words = ("Refused", observed.refusal) if observed.refusal else ("CreatingPods", "")
    status = with_truth(status, ConditionType.SCHEDULED, "False", reason, words, now=now)
    status = in_phase(status, Phase.SCHEDULING)
    try:
        actions = tuple(_creations(observed, job, plan, gang, children))
    except InvalidSpecError as error:
        return Formation(status=status, fatal_reason="InvalidSpec", fatal=str(error))
    return Formation(status=status, actions=actions)


def _creations(observed: Observed, job: DLRMJob, plan: Plan, gang: Gang, children: Children) -> Iterator[Action]:
    owner = Owner.of(observed.job)
    secret = token_secret(job, gang.attempt, owner)
    if secret["metadata"]["name"] not in {seen.name for seen in children.secrets}:
        yield ApplySecret(manifest=secret)
    service = gang_service(job, owner)
    if service["metadata"]["name"] not in children.services:
        yield ApplyService(manifest=service)
    attempt = Attempt(
        job=job,
        number=gang.attempt,
        plan=plan,
        profile=observed.profile,
        images=observed.images,
        owner=owner,
    )
    pods = trainer_pods(attempt)
    for index in gang.missing():
        yield CreatePod(manifest=pods[index], owner_uid=observed.job.uid, attempt=gang.attempt)


def _outdated(observed: Observed, children: Children, attempt: int) -> Iterator[Action]:
    """Plans and tokens of earlier attempts: nothing mounts them any more."""
    key = observed.job.key
    for config_map in children.config_maps:
        if config_map.attempt < attempt:
            yield DeleteObject(kind="ConfigMap", key=key, name=config_map.name, uid=config_map.uid)
    for secret in children.secrets:
        if secret.attempt < attempt:
            yield DeleteObject(kind="Secret", key=key, name=secret.name, uid=secret.uid)


def _planned(status: DLRMJobStatus, plan: Plan, now: datetime) -> DLRMJobStatus:
    status = status.model_copy(update={"plan": plan_status(plan)})
    words = _first_reasons(plan)
    return with_truth(status, ConditionType.PLANNED, "True", "Planned", words, now=now)


def _first_reasons(plan: Plan) -> str:
    """The plan's first reasons, as many as a reader of conditions wants."""
    return "; ".join(plan.reasons[:3])
