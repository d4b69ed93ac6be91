"""All objects of one attempt in one list: what ``dlrmctl render`` prints."""

from __future__ import annotations

from dlrm_api.hardware import HardwareProfile
from dlrm_api.job import DLRMJob
from dlrm_api.plan import Plan, plan_to_parts
from dlrm_operator.manifests import Manifest
from dlrm_operator.manifests.gang_scheduling import pod_groups
from dlrm_operator.manifests.manifests import Images, Owner, gang_service, plan_config_maps
from dlrm_operator.manifests.pods import Attempt, trainer_pods
from dlrm_operator.manifests.restrictions import RESTRICTED, OverlayLimits


def render(
    job: DLRMJob,
    profile: HardwareProfile | None,
    plan: Plan,
    *,
    attempt: int = 1,
    images: Images | None = None,
    limits: OverlayLimits = RESTRICTED,
    uid: str = "",
) -> list[Manifest]:
    """Every object that the operator creates for one attempt, in the order in which it creates them.

    Pods are told no digest of a control token, so those that somebody makes of these take no cuts by request.

    Args:
        job: The job; its namespace is used where it names one.
        profile: The HardwareProfile that ``trainer.hardware`` names.
        plan: The job's plan.
        attempt: Number of the gang.
        images: Images where the job names none; by default this version's own.
        limits: How far the pod overlay may go.
        uid: The job's uid; without it the objects name no owner.

    Raises:
        InvalidSpecError: the job's document is too large, or the pod overlay goes beyond the limits or collides
            with what the operator sets.
    """
    owner = Owner(name=job.metadata.name, uid=uid)
    job = job.with_replicas(plan.nodes)
    gang = Attempt(
        job=job, number=attempt, plan=plan, profile=profile, images=images or Images(), owner=owner, limits=limits
    )
    maps = plan_config_maps(job, attempt, plan, plan_to_parts(plan), owner)
    pods = trainer_pods(gang, maps)
    return [
        gang_service(job, owner),
        *maps,
        *pod_groups(job, attempt, pods, owner),
        *pods,
    ]
