"""The trainer pods of one attempt, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from dlrm_api import names
from dlrm_api.hardware import HardwareProfile, NetworkSpec
from dlrm_api.job import DLRMJob
from dlrm_api.lifecycle import codes_without_restart
from dlrm_api.names import ANY_ADDRESS, Annotation, Container, Env, Path, Port
from dlrm_api.plan import Plan, plan_to_parts
from dlrm_operator.manifests import Manifest, pod_template
from dlrm_operator.manifests.objects import Owner, PodDefaults, config_volume, gang_service, metadata, plan_config_maps
from dlrm_operator.manifests.scheduling import group_gates, group_metadata, placement, pod_groups
from dlrm_operator.manifests.storage import tier_bytes, tier_mounts, tier_volumes
from dlrm_planner import CUDA_SHARED_BYTES, checkpointer_bytes, working_set_bytes

ASSIGNMENT_FILE = "attempt"
IPC_LOCK = "IPC_LOCK"
"""Capability to pin memory. Of the levels of Pod Security only ``privileged`` allows it."""
# Started trainers load, read and create their tables before they meet.
RENDEZVOUS_TIMEOUT_S = 1_800
# Time that a trainer waits for pods without a node if the job sets no pendingDeadline.
MAX_PENDING_S = 6 * 3_600


@dataclass(frozen=True, kw_only=True)
class PodAttempt:
    """Hold all that the pods of one attempt depend on."""

    job: DLRMJob
    number: int
    plan: Plan
    profile: HardwareProfile | None
    owner: Owner
    defaults: PodDefaults = field(default_factory=PodDefaults)
    limits: pod_template.PodTemplatePolicy = pod_template.RESTRICTED
    memory_reserve_bytes: int = 0
    """Memory of each pod beyond what the plan needs."""
    committed_snapshot: str = ""
    """URI of the manifest of the newest known snapshot; empty without one."""
    avoided_nodes: tuple[str, ...] = ()
    restarts_in_place: bool = False
    """Whether failed trainers restart in their pods, where they wait for the operator to assign their next attempt."""
    secret: bool = True
    """Whether its ranks share a secret: all of them, or none."""


def trainer_pods(attempt: PodAttempt, maps: list[Manifest]) -> list[Manifest]:
    """Build the pods by index; equal arguments give equal pods. ``maps`` are the attempt's ConfigMaps.

    Raises:
        InvalidSpecError: the pod template violates the policy or collides with what the operator sets, or a tier has
            nothing to mount; names the field.
    """
    pod_template.check_policy(attempt.job.spec, attempt.job.metadata.namespace or "", attempt.limits)
    config = config_volume(maps)
    sizes = zip(_trainer_memory_bytes(attempt.job, attempt.plan), tier_bytes(attempt.plan), strict=True)
    return [_pod(attempt, index, size, tiers, config) for index, (size, tiers) in enumerate(sizes)]


def with_derived(pod: Manifest, values: Mapping[str, str]) -> Manifest:
    """Set variables of the trainer that are derived when the pod is created; none is added."""
    spec = pod["spec"]
    trainer = next(container for container in spec["containers"] if container["name"] == Container.TRAINER)
    env = [
        {**variable, "value": values[name]} if (name := variable["name"]) in values else variable
        for variable in trainer["env"]
    ]
    containers = [{**trainer, "env": env} if container is trainer else container for container in spec["containers"]]
    return {**pod, "spec": {**spec, "containers": containers}}


def _pod(attempt: PodAttempt, index: int, memory_bytes: int, tiers: dict[str, int], config: Manifest) -> Manifest:
    """Build one pod; ``tiers`` are the bytes of its ranks in files, by tier."""
    job, defaults = attempt.job, attempt.defaults
    name = names.trainer_pod(job.metadata.name, attempt.number, index)
    spec: Manifest = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        # Process 1 of a container would miss a SIGTERM that arrives while Python starts.
        "shareProcessNamespace": True,
        "hostname": name,
        "subdomain": names.trainer_service(job.metadata.name),
        "terminationGracePeriodSeconds": _grace_seconds(job),
        "securityContext": {**pod_template.POD_SECURITY, **defaults.identity},
        "nodeSelector": defaults.node_selector,
        "initContainers": [_checkpointer(attempt, index)],
        "containers": [_trainer(attempt, index, memory_bytes, tiers)],
        "volumes": _volumes(attempt, index, tiers, config),
        **placement(job, attempt.profile, attempt.number, attempt.avoided_nodes),
    }
    meta = metadata(job, name, attempt.owner, attempt.number, index)
    labels, annotations = group_metadata(job, attempt.number, attempt.plan.nodes)
    meta["labels"] |= labels
    if annotations:
        meta["annotations"] = annotations
    if defaults.pull_secrets:
        spec["imagePullSecrets"] = [{"name": secret} for secret in defaults.pull_secrets]
    if gates := group_gates(job.spec.scheduling):
        spec["schedulingGates"] = gates
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec}
    return pod_template.with_overlay(pod, job.spec.trainer.pod_template)


def _grace_seconds(job: DLRMJob) -> int:
    return max(1, round(job.spec.lifecycle.termination_grace_period))


def _rendezvous_timeout_s(job: DLRMJob) -> int:
    """Exceed the time for which pods may be pending: ranks must not give up on a starting attempt."""
    deadline = job.spec.lifecycle.pending_deadline
    return RENDEZVOUS_TIMEOUT_S + round(MAX_PENDING_S if deadline is None else deadline)


def _trainer(attempt: PodAttempt, index: int, memory_bytes: int, tiers: dict[str, int]) -> Manifest:
    job, trainer = attempt.job, attempt.job.spec.trainer
    command = ["python", "-m", "dlrm_trainer", "--job", Path.JOB, "--plan", Path.PLAN]
    rank0 = f"{names.trainer_pod(job.metadata.name, attempt.number, 0)}.{names.trainer_service(job.metadata.name)}"
    env = {
        Env.MASTER_ADDR: rank0,
        Env.MASTER_PORT: str(Port.RENDEZVOUS),
        Env.RENDEZVOUS_TIMEOUT_S: str(_rendezvous_timeout_s(job)),
        Env.TRAINER_PORT: str(Port.TRAINER),
        # with_derived sets it, and the secret below, when the pod is created.
        Env.TOKEN_SHA256: "",
    }
    if attempt.secret:
        env[Env.GANG_SECRET] = ""
    if attempt.committed_snapshot:
        env[Env.COMMITTED_SNAPSHOT] = attempt.committed_snapshot
    if tiers:
        env[Env.TIER_DIR] = Path.TIERS
    if (network := _gpu_network(attempt.plan, attempt.profile)) is not None:
        env |= network.nccl_environment
    own: list[Manifest] = []
    if job.spec.data.credentials_secret:
        env[Env.DATA_CREDENTIALS_DIR] = Path.DATA_CREDENTIALS
        own.append({"name": "data-credentials", "mountPath": Path.DATA_CREDENTIALS, "readOnly": True})
    if attempt.restarts_in_place:
        env |= {Env.ASSIGNMENT: f"{Path.ASSIGNMENT}/{ASSIGNMENT_FILE}", Env.LAUNCHED: Path.LAUNCHED}
        own.append({"name": "assignment", "mountPath": Path.ASSIGNMENT, "readOnly": True})
    container = _container(attempt, index, command, env, {"trainer": Port.TRAINER, "rendezvous": Port.RENDEZVOUS})
    if attempt.plan.device == "cuda":
        own.append({"name": "shm", "mountPath": Path.SHARED_MEMORY})
    container["volumeMounts"] = [*container["volumeMounts"], *own, *tier_mounts(tiers)]
    if network is not None and network.rdma and network.rdma.ipc_lock:
        security = {"capabilities": {"add": [IPC_LOCK]}}
        container["securityContext"] = pod_template.joined_security(pod_template.CONTAINER_SECURITY, security)
    return {
        "name": Container.TRAINER,
        "image": trainer.image or attempt.defaults.images.trainer_on(attempt.plan.device),
        **(_restart_rules(job) if attempt.restarts_in_place else {}),
        **container,
        "resources": _trainer_resources(job, attempt.profile, network, memory_bytes, attempt.memory_reserve_bytes),
    }


def _gpu_network(plan: Plan, profile: HardwareProfile | None) -> NetworkSpec | None:
    """Return the network of a profile if ranks compute on GPUs, which NCCL connects; else None."""
    return profile.spec.network if profile is not None and plan.device == "cuda" else None


def _restart_rules(job: DLRMJob) -> Manifest:
    """Let the kubelet restart the trainer unless its exit code says that this cannot help."""
    final = codes_without_restart(job.spec.lifecycle.restart)
    rule = {"action": "Restart", "exitCodes": {"operator": "NotIn", "values": final}}
    return {"restartPolicy": "Never", "restartPolicyRules": [rule]}


def _checkpointer(attempt: PodAttempt, index: int) -> Manifest:
    """Build the native sidecar: it stops after the trainer, so it can upload the last cut."""
    command = ["python", "-m", "dlrm_checkpointer", "--job", Path.JOB]
    env = {Env.CHECKPOINTER_PORT: str(Port.CHECKPOINTER)}
    if attempt.restarts_in_place:
        env[Env.RESTARTS_IN_PLACE] = "1"
    return {
        "name": Container.CHECKPOINTER,
        "image": attempt.job.spec.trainer.checkpointer_image or attempt.defaults.images.checkpointer,
        "restartPolicy": "Always",
        **_container(attempt, index, command, env, {"checkpointer": Port.CHECKPOINTER}),
        "resources": _checkpointer_resources(attempt.job),
    }


def _container(
    attempt: PodAttempt, index: int, command: list[str], env: dict[str, str], ports: dict[str, int]
) -> Manifest:
    """Build what both containers share. The kubelet stops them in turn: each has half of the grace period."""
    job = attempt.job
    shared = {
        Env.JOB_NAME: job.metadata.name,
        Env.ATTEMPT: str(attempt.number),
        Env.REPLICA: str(index),
        Env.BIND: ANY_ADDRESS,
        Env.HANDOFF_DIR: Path.HANDOFF,
        Env.TERMINATION_LOG: Path.TERMINATION_LOG,
        Env.GRACE_S: str(max(1, _grace_seconds(job) // 2)),
        "HOME": Path.SCRATCH,
        "TMPDIR": Path.SCRATCH,
    }
    mounts: list[Manifest] = [
        {"name": "config", "mountPath": Path.CONFIG, "readOnly": True},
        {"name": "handoff", "mountPath": Path.HANDOFF},
        {"name": "scratch", "mountPath": Path.SCRATCH},
    ]
    if job.spec.checkpoint.credentials_secret:
        shared[Env.CREDENTIALS_DIR] = Path.CREDENTIALS
        mounts.append({"name": "credentials", "mountPath": Path.CREDENTIALS, "readOnly": True})
    return {
        "imagePullPolicy": job.spec.trainer.image_pull_policy,
        "command": command,
        "env": [{"name": name, "value": value} for name, value in {**shared, **env}.items()],
        "ports": [{"name": name, "containerPort": port} for name, port in ports.items()],
        "volumeMounts": mounts,
        "securityContext": pod_template.CONTAINER_SECURITY,
        "terminationMessagePath": Path.TERMINATION_LOG,
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }


def _volumes(attempt: PodAttempt, index: int, tiers: dict[str, int], config: Manifest) -> list[Manifest]:
    job, handoff_bytes = attempt.job, attempt.plan.handoff_bytes[index]
    volumes: list[Manifest] = [
        config,
        {"name": "handoff", "emptyDir": {"medium": "Memory", "sizeLimit": str(handoff_bytes)}},
        {"name": "scratch", "emptyDir": {}},
    ]
    if attempt.restarts_in_place:
        field = {"fieldPath": f"metadata.annotations['{Annotation.ASSIGNED_ATTEMPT}']"}
        volumes.append({"name": "assignment", "downwardAPI": {"items": [{"path": ASSIGNMENT_FILE, "fieldRef": field}]}})
    if secret := job.spec.checkpoint.credentials_secret:
        volumes.append({"name": "credentials", "secret": {"secretName": secret}})
    if secret := job.spec.data.credentials_secret:
        volumes.append({"name": "data-credentials", "secret": {"secretName": secret}})
    # NCCL uses shared memory within a pod; a container's default is too small.
    if attempt.plan.device == "cuda":
        size = CUDA_SHARED_BYTES * attempt.plan.processes_per_node
        volumes.append({"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": str(size)}})
    return volumes + tier_volumes(tiers, attempt.profile)


def _trainer_resources(
    job: DLRMJob, profile: HardwareProfile | None, network: NetworkSpec | None, memory_bytes: int, reserve: int
) -> Manifest:
    """Complete the user's resources of a trainer: memory plus ``reserve``, CPUs, devices, and RDMA devices of GPUs."""
    trainer = job.spec.trainer
    requests, limits = dict(trainer.resources.requests), dict(trainer.resources.limits)
    if "memory" not in requests and "memory" not in limits:
        requests["memory"] = str(memory_bytes + reserve)
    if trainer.threads_per_process and "cpu" not in requests and "cpu" not in limits:
        requests["cpu"] = str(trainer.threads_per_process * trainer.processes_per_replica)
    if profile and profile.spec.devices and profile.spec.devices.resource not in limits:
        limits[profile.spec.devices.resource] = str(trainer.processes_per_replica)
    if network and network.rdma and network.rdma.resource not in limits:
        limits[network.rdma.resource] = str(network.rdma.count)
    return _stated(requests=requests, limits=limits)


def _checkpointer_resources(job: DLRMJob) -> Manifest:
    """Complete the user's resources of a checkpointer by the memory of its process.

    The rows that it reads are in the hand-off, which is charged to the trainer.
    """
    resources = job.spec.checkpoint.resources
    requests, limits = dict(resources.requests), dict(resources.limits)
    if "memory" not in requests and "memory" not in limits:
        requests["memory"] = str(checkpointer_bytes(job.spec))
    return _stated(requests=requests, limits=limits)


def _stated(**amounts: dict[str, str]) -> Manifest:
    return {kind: each for kind, each in amounts.items() if each}


def _trainer_memory_bytes(job: DLRMJob, plan: Plan) -> list[int]:
    """Return the memory of each pod's trainer: working set, tables and hand-off (in its tmpfs).

    Kueue counts pods with equal requests as one role, and allows at most 8 roles in a group: all of its pods request
    what the largest one needs.
    """
    found = [working_set_bytes(job.spec, plan.device) - checkpointer_bytes(job.spec)] * plan.nodes
    for rank in plan.ranks:
        found[rank.node] += rank.bytes_per_tier.get("ddr", 0)
    return [max(found)] * plan.nodes if job.spec.scheduling.gang == "kueue" else found


def render_objects(
    job: DLRMJob,
    profile: HardwareProfile | None,
    plan: Plan,
    *,
    attempt: int = 1,
    defaults: PodDefaults | None = None,
    limits: pod_template.PodTemplatePolicy = pod_template.RESTRICTED,
    uid: str = "",
) -> list[Manifest]:
    """Build every object that the operator creates for one attempt, in the order of creation.

    The pods have no digest of a control token, so pods created from this output refuse requests for cuts. Without
    ``uid``, the job's, the objects have no owner.

    Raises:
        InvalidSpecError: the job's document is too large, or the pod template violates the policy or collides with
            what the operator sets.
    """
    owner = Owner(name=job.metadata.name, uid=uid)
    job = job.with_replicas(plan.nodes)
    gang = PodAttempt(
        job=job,
        number=attempt,
        plan=plan,
        profile=profile,
        owner=owner,
        defaults=defaults or PodDefaults(),
        limits=limits,
    )
    maps = plan_config_maps(job, attempt, plan, plan_to_parts(plan), owner)
    pods = trainer_pods(gang, maps)
    return [gang_service(job, owner), *maps, *pod_groups(job, attempt, pods, owner), *pods]
