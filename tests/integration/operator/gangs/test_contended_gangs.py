"""Gangs of 64 pods that contend for room for one: each is bound whole or not at all.

The pods are those that the operator renders, without what no scheduler reads, created in random order and haste.
``make contended`` runs as many random trials as one likes. What is bound is followed by a watch without a gap.
"""

import os
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache

import pytest

from dlrm_api import names
from dlrm_api.job import parse_job
from dlrm_api.names import Label
from dlrm_api.plan import Plan
from dlrm_cluster.components import NODE_LABELS
from dlrm_cluster.control_plane import ControlPlane
from dlrm_cluster.errors import MissingToolError
from dlrm_cluster.fixtures import refuse
from dlrm_operator.api_client import ClusterUnavailableError, GoneError, KubernetesApi
from dlrm_operator.login import ClusterAccount
from dlrm_operator.manifests.pods import render_objects
from dlrm_operator.manifests.scheduling import POD_GROUPS
from dlrm_planner import plan_job
from dlrm_testing.operator.fake_kubelets import FAKE, kwok_server
from dlrm_testing.operator.kueue import Kueue
from dlrm_testing.operator.operator_cluster import Object, eventually, job_document

pytestmark = pytest.mark.cluster
TRIALS = int(os.environ.get("GANG_TRIALS", "2"))
SEED = int(os.environ.get("GANG_SEED", "0"))
SCHEDULERS = os.environ.get("GANG_SCHEDULERS", "native").split()
PODS = 64
MIN_PODS = 46
ROOM = 2 * MIN_PODS - 1
"""Pods for which there is room: for one gang of any size, never for two."""
NODES = 16
QUIET_S = 1.0
"""A scheduler that bound nothing for this long is done with the gangs that it knows."""
PROGRESS_TRIALS = 10
NODE_STAGES = ("node/fast/node-initialize.yaml",)
"""What kwok does: pods that are bound stay as they are."""
WATCH_S = 2
"""Duration of one watch; the next continues where it ended."""
MERGE_PATCH = "application/merge-patch+json"
READ_BY_SCHEDULERS = {"schedulingGroup", "schedulingGates", "nodeSelector", "affinity", "schedulerName"}


@dataclass
class GangHistory:
    """What the watch showed of the pods of one attempt."""

    nodes: dict[str, str] = field(default_factory=dict)
    """Node of each existing pod; empty if it has none."""
    max_bound: int = 0
    first_bound: float = 0.0
    last_bound: float = 0.0

    @property
    def bound(self) -> int:
        return sum(map(bool, self.nodes.values()))


class BindHistory(threading.Thread):
    """Follow the pods of a namespace; histories by job."""

    def __init__(self, api: KubernetesApi, namespace: str) -> None:
        super().__init__(daemon=True)
        self._api = api
        self._path = f"/api/v1/namespaces/{namespace}/pods"
        _, self._version = self._api.list_now(self._path, {})
        self._lock = threading.Lock()
        self._gangs: dict[str, GangHistory] = {}
        self._ended = threading.Event()
        self.gap = ""
        """Why the watch did not show everything."""

    def __enter__(self) -> "BindHistory":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self.join()

    def run(self) -> None:
        while not self.gap and not self._ended.is_set():
            query = {"resourceVersion": self._version, "timeoutSeconds": str(WATCH_S), "allowWatchBookmarks": "true"}
            try:
                for event in self._api.watch(self._path, query, silence_s=10 * WATCH_S):
                    self._hear(event["type"], event["object"])
            except (ClusterUnavailableError, GoneError) as error:
                self.gap = str(error)

    def of(self, job: str) -> GangHistory:
        """The history of a job's gang, up to now."""
        with self._lock:
            found = self._gangs.get(job, GangHistory())
            return replace(found, nodes=dict(found.nodes))

    def _hear(self, kind: str, pod: Object) -> None:
        meta = pod["metadata"]
        self._version = meta["resourceVersion"]
        if Label.JOB not in meta.get("labels", {}):
            return
        with self._lock:
            gang = self._gangs.setdefault(meta["labels"][Label.JOB], GangHistory())
            if kind == "DELETED":
                gang.nodes.pop(meta["name"], None)
                return
            node = pod["spec"].get("nodeName", "")
            if node and not gang.nodes.get(meta["name"]):
                gang.last_bound = time.monotonic()
                gang.first_bound = gang.first_bound or gang.last_bound
            gang.nodes[meta["name"]] = node
            gang.max_bound = max(gang.max_bound, gang.bound)


@pytest.fixture(scope="module")
def nodes(api_types: ControlPlane, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """The names of kwok's nodes; they have no room yet."""
    try:
        kwok = kwok_server(api_types, tmp_path_factory.mktemp("kwok"), NODE_STAGES)
    except MissingToolError as error:
        refuse(error)
    kwok.start()
    found = [f"contended-{number}" for number in range(NODES)]
    for name in found:
        labels = {"kubernetes.io/hostname": name, **NODE_LABELS, "pool": "contended"}
        api_types.api.call("POST", "/api/v1/nodes", {"metadata": {"name": name, "labels": labels, "annotations": FAKE}})
    yield found
    for name in found:
        api_types.api.call("DELETE", f"/api/v1/nodes/{name}")
    kwok.stop()
    print(kwok.log_tail())


@pytest.fixture(scope="module", params=SCHEDULERS)
def scheduling(
    request: pytest.FixtureRequest, api_types: ControlPlane, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Object, Kueue | None]]:
    """``spec.scheduling`` of the jobs."""
    if request.param == "native":
        yield {"gang": "native"}, None
        return
    try:
        kueue = Kueue(api_types, tmp_path_factory.mktemp("kueue"))
    except MissingToolError as error:
        refuse(error)
    with kueue:
        yield {"gang": "kueue", "queue": "ads"}, kueue
    print(kueue.server.log_tail())


def rendered(name: str, size: int, scheduling: Object) -> tuple[list[Object], list[Object]]:
    """PodGroups and pods of a job."""
    document = job_document(name, size, scheduling=scheduling)
    trainer = document["spec"]["trainer"]
    trainer["resources"] = {"requests": {"cpu": "1"}}
    trainer["podTemplate"] = {"spec": {"nodeSelector": {"pool": "contended"}}}
    job = parse_job(document)
    objects = render_objects(job, None, plan_of(size))
    pods = [each for each in objects if each["kind"] == "Pod"]
    for pod in pods:
        wanted = [container["resources"] for container in pod["spec"]["containers"]]
        pod["spec"] = {key: pod["spec"][key] for key in READ_BY_SCHEDULERS & set(pod["spec"])}
        pod["spec"]["containers"] = [{"name": "main", "image": "none", "resources": each} for each in wanted]
    return [each for each in objects if each["kind"] == "PodGroup"], pods


@cache
def plan_of(size: int) -> Plan:
    return plan_job(parse_job(job_document("demo", size)).spec, None)


class Trial:
    """Let two or three gangs contend, and check what was bound whenever the scheduler is quiet."""

    def __init__(self, seed: int, scheduling: Object, api: KubernetesApi, namespace: str, history: BindHistory) -> None:
        self._dice = random.Random(seed)
        self._seed, self._scheduling, self._history = seed, scheduling, history
        self._api, self._namespace = api, namespace
        self._pods = f"/api/v1/namespaces/{namespace}/pods"
        self._sizes: dict[str, int] = {}

    def run(self, nodes: list[str]) -> float:
        """Return the longest time from the first to the last bound pod of a gang."""
        self._make_room(nodes)
        self._arrive()
        left = set(self._sizes)
        self._bind_one_of(left)
        while left and self._dice.random() < 0.5:
            winner = next(name for name in left if self._history.of(name).bound)
            self._delete(winner)
            left.remove(winner)
            self._bind_one_of(left)
        # Those without nodes first: the room of the others would let them bind what is left of them.
        for name in sorted(left, key=lambda name: self._history.of(name).bound):
            self._delete(name)
        eventually(lambda: not any(self._history.of(name).nodes for name in self._sizes), state=self._state)
        self._check()
        gangs = [self._history.of(name) for name in self._sizes]
        return max(gang.last_bound - gang.first_bound for gang in gangs)

    def _make_room(self, nodes: list[str]) -> None:
        """Divide the room over the nodes at random."""
        cuts = sorted(self._dice.choices(range(ROOM + 1), k=len(nodes) - 1))
        for name, start, end in zip(nodes, [0, *cuts], [*cuts, ROOM], strict=True):
            room = {"cpu": str(end - start), "memory": "4Ti", "pods": "1000"}
            status = {"status": {"capacity": room, "allocatable": room}}
            self._api.call_now("PATCH", f"/api/v1/nodes/{name}/status", status, kind=MERGE_PATCH)

    def _arrive(self) -> None:
        """Create two or three gangs, one of them of 64 pods, one after the other or intermingled."""
        sizes = [PODS, *self._dice.choices(range(MIN_PODS, PODS + 1), k=self._dice.choice((1, 2)))]
        self._dice.shuffle(sizes)
        self._sizes = {f"t{self._seed}-{number}": size for number, size in enumerate(sizes)}
        created: list[Object] = []
        for name, size in self._sizes.items():
            groups, pods = rendered(name, size, self._scheduling)
            for group in groups:
                kind = POD_GROUPS[self._scheduling["gang"]]
                self._api.call_now("POST", kind.path(self._namespace), group)
            created += pods
        if self._dice.random() < 0.5:
            self._dice.shuffle(created)
        with ThreadPoolExecutor(self._dice.choice((2, 4, 8))) as threads:
            list(threads.map(lambda pod: self._api.call_now("POST", self._pods, pod), created))

    def _delete(self, name: str) -> None:
        """Delete a gang without waiting for its kubelets, and its group."""
        options = {"kind": "DeleteOptions", "apiVersion": "v1", "gracePeriodSeconds": 0}
        with ThreadPoolExecutor(8) as threads:
            paths = [f"{self._pods}/{names.trainer_pod(name, 1, index)}" for index in range(self._sizes[name])]
            list(threads.map(lambda path: self._api.call_now("DELETE", path, options), paths))
        if kind := POD_GROUPS.get(self._scheduling["gang"]):
            self._api.call_now("DELETE", f"{kind.path(self._namespace)}/{names.pod_group(name, 1)}")

    def _bind_one_of(self, left: set[str]) -> None:
        """Wait until one of these gangs is bound, if there is any, and no other will be."""

        def is_settled() -> bool:
            assert not self._history.gap
            gangs = {name: self._history.of(name) for name in left}
            if any(len(gang.nodes) < self._sizes[name] for name, gang in gangs.items()):
                return False
            bound = any(gang.bound == self._sizes[name] for name, gang in gangs.items())
            return bound and time.monotonic() - max(gang.last_bound for gang in gangs.values()) > QUIET_S

        if left:
            eventually(is_settled, state=self._state)
        self._check()

    def _check(self) -> None:
        """Every gang of which a pod was ever bound has been bound whole."""
        assert all(self._history.of(name).max_bound in (0, size) for name, size in self._sizes.items()), self._state()
        assert not self._history.gap

    def _state(self) -> str:
        return f"seed {self._seed}, room {ROOM}, {self._history.gap}: " + "; ".join(
            f"{name}: {gang.bound} of {len(gang.nodes)} bound, at most {gang.max_bound} of {size}"
            for name, size in self._sizes.items()
            for gang in [self._history.of(name)]
        )


def test_no_gang_is_ever_partly_bound(
    scheduling: tuple[Object, Kueue | None], nodes: list[str], api_types: ControlPlane, namespace: str
) -> None:
    spec, kueue = scheduling
    if kueue is not None:
        kueue.queue(namespace, cpus=ROOM)
    api = KubernetesApi(ClusterAccount(str(api_types.kubeconfig)))
    started, longest = time.monotonic(), 0.0

    with BindHistory(api, namespace) as history:
        for number in range(TRIALS):
            longest = max(longest, Trial(SEED + number, spec, api, namespace, history).run(nodes))
            if (number + 1) % PROGRESS_TRIALS == 0 or number + 1 == TRIALS:
                elapsed = time.monotonic() - started
                print(
                    f"{spec['gang']}: {number + 1} trials from seed {SEED}, 0 partly bound, "
                    f"a gang bound within {longest:.2f} s, {elapsed:.0f} s",
                    flush=True,
                )
