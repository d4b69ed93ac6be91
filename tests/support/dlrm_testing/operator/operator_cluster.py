"""Jobs and operator processes on a real control plane."""

import os
import signal
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from dlrm_api.plan import Plan, plan_to_parts, plan_without_tables
from dlrm_cluster.api import Api, ApiError
from dlrm_cluster.components import NODE_LABELS
from dlrm_cluster.ports import free_port
from dlrm_operator.reconcile.state import Planning
from dlrm_testing.operator.kubelet_double import KubeletDouble
from dlrm_testing.programs import fork_context, run_module
from dlrm_testing.waiting import wait_until

Object = dict[str, Any]
JOBS = "/apis/dlrm.dev/v1alpha1/namespaces/{}/dlrmjobs"
GRACE_S = 30
"""Grace period of the operator's pod (s), the chart's default."""
PRELOADED = ("dlrm_operator.controller.handlers", "dlrm_operator.settings", "dlrm_testing.programs")


def job_document(name: str, replicas: int = 2, **spec: Any) -> Object:
    """Return a small job of ``replicas`` pods, which are replaced if one fails; ``spec`` replaces whole sections."""
    return {
        "apiVersion": "dlrm.dev/v1alpha1",
        "kind": "DLRMJob",
        "metadata": {"name": name},
        "spec": {
            "model": {
                "denseFeatures": ["I1", "I2"],
                "bottomMlp": [8, 4],
                "topMlp": [8, 1],
                "tables": [{"name": "a", "rows": 1_000, "dim": 4}, {"name": "b", "rows": 2_000, "dim": 4}],
            },
            "data": {"format": "synthetic", "globalBatchSize": 64},
            "trainer": {"replicas": replicas},
            "checkpoint": {"uri": "s3://bucket/prefix"},
            "lifecycle": {
                "restart": {"maxRestarts": 3, "backoff": "0s", "inPlace": False},
                "terminationGracePeriod": "30s",
            },
            **spec,
        },
    }


def add_node(api: Api, name: str, capacity: Object, taints: Sequence[Object] = (), **labels: str) -> None:
    """Make a node without a kubelet, unless it exists; ``labels`` are those beside a kubelet's own."""
    meta = {"name": name, "labels": {"kubernetes.io/hostname": name, **NODE_LABELS, **labels}}
    node = {"apiVersion": "v1", "kind": "Node", "metadata": meta, "spec": {"taints": list(taints)}}
    api.ensure("/api/v1/nodes", node)
    ready = {"type": "Ready", "status": "True", "reason": "Test", "message": "made by a test"}
    status = {"capacity": capacity, "allocatable": capacity, "conditions": [ready]}
    api.call("PATCH", f"/api/v1/nodes/{name}/status", {"status": status})


def planner_answer(plan: Plan) -> Planning:
    """Return the planner's answer in the form of its process."""
    parts = plan_to_parts(plan)
    return Planning(plan=plan_without_tables(parts), parts=parts)


class JobDriver:
    """Act as the user of one job."""

    def __init__(self, api: Api, namespace: str, document: Object) -> None:
        self.api = api
        self.namespace = namespace
        self.name: str = document["metadata"]["name"]
        self.path = JOBS.format(namespace) + "/" + self.name
        self.created = api.call("POST", JOBS.format(namespace), document)

    def get(self) -> Object:
        return self.api.call("GET", self.path)

    def status(self) -> Object:
        found: Object = self.get().get("status", {})
        return found

    def phase(self) -> str:
        return str(self.status().get("phase", ""))

    def condition(self, kind: str) -> Object:
        found = [c for c in self.status().get("conditions", []) if c["type"] == kind]
        return found[0] if found else {}

    def patch(self, change: Object) -> None:
        """Change the job by a merge patch."""
        self.api.call("PATCH", self.path, change)

    def delete(self) -> None:
        self.api.call("DELETE", self.path)

    def until(self, phase: str, timeout_s: float = 150.0) -> Object:
        eventually(lambda: self.phase() == phase, timeout_s, lambda: f"{self.name}: {self.status()}")
        return self.status()

    def children(self) -> list[str]:
        """Return all objects in the namespace with the job's label."""
        found = []
        for kind in ("pods", "services", "configmaps", "secrets"):
            items = self.api.call(
                "GET", f"/api/v1/namespaces/{self.namespace}/{kind}?labelSelector=dlrm.dev/job={self.name}"
            )
            found += [f"{kind}/{item['metadata']['name']}" for item in items["items"]]
        return found

    def events(self) -> list[str]:
        items = self.api.call("GET", f"/api/v1/namespaces/{self.namespace}/events")["items"]
        return [item["reason"] for item in items if item["involvedObject"]["name"] == self.name]


def trains(kubelet: KubeletDouble, job: JobDriver, attempt: int, size: int = 2) -> list[str]:
    """Wait for the gang of ``attempt``, let it train, and return the names of its pods."""
    names = [f"{job.name}-trainer-{attempt}-{index}" for index in range(size)]
    eventually(
        lambda: {p["metadata"]["name"] for p in kubelet.pods() if p["status"].get("phase") == "Running"} == set(names),
        state=lambda: str(job.status()),
    )
    kubelet.report_training(names[0], attempt)
    job.until("Running")
    return names


class OperatorProcess:
    """Run the operator for one namespace, or all."""

    def __init__(self, kubeconfig: Path, namespace: str | None, log: Path, *further: str, **variables: str) -> None:
        self.port = free_port("127.0.0.1")
        self._log = log
        flags = [*(("--namespace", namespace) if namespace else ()), "--address", "127.0.0.1", "--port", str(self.port)]
        flags += [
            "--poll-seconds",
            "0.2",
            "--resync-seconds",
            "2",
            "--status-debounce-seconds",
            "0.2",
            "--log-format",
            "plain",
        ]
        flags += ["--identity", f"operator-{self.port}", *further]
        self._flags = flags
        self._env = {**os.environ, "KUBECONFIG": str(kubeconfig), "OMP_NUM_THREADS": "1", **variables}
        self._process: ForkServerProcess | None = None

    def start(self) -> None:
        self._log.touch()  # a test may read it before the operator writes
        arguments = ["dlrm_operator", *self._flags], self._env, {}, self._log
        self._process = fork_context(PRELOADED).Process(target=run_module, args=arguments)
        self._process.start()

    def kill(self) -> None:
        """Kill the process with SIGKILL."""
        assert self._process is not None
        self._process.kill()
        self._process.join()

    @property
    def ended(self) -> bool:
        """Return whether the process ended by itself."""
        return self._process is not None and self._process.exitcode is not None

    def stop(self) -> int:
        assert self._process is not None
        self._process.terminate()
        self._process.join(GRACE_S)
        code = self._process.exitcode
        if code is None:
            assert self._process.pid is not None
            os.kill(self._process.pid, signal.SIGUSR2)
            self._process.join(1)  # it prints its stacks
            self.kill()
            raise TimeoutError(f"the operator did not end within {GRACE_S} s of SIGTERM: {self.log()}")
        return code

    def get(self, path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/{path}", timeout=5) as answer:
            text: str = answer.read().decode()
        return text

    def wait_ready(self) -> None:
        """Wait until the operator is ready; fail with its log if it ends before."""
        assert self._process is not None

        def ready_or_dead() -> bool:
            return self.answers("readyz") or self.ended

        eventually(ready_or_dead, state=self.log)
        assert not self.ended, self.log()

    def read_text(self, path: str) -> str:
        """Return the body of any response, an error's too; empty if nothing answers."""
        try:
            return self.get(path)
        except urllib.error.HTTPError as error:
            with error:
                return error.read().decode()
        except OSError:
            return ""

    def answers(self, path: str) -> bool:
        try:
            self.get(path)
        except OSError:
            return False
        return True

    def log(self) -> str:
        return self._log.read_text()

    def __enter__(self) -> "OperatorProcess":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        if not self.ended:
            self.stop()


def eventually(truth: Callable[[], Any], timeout_s: float = 150.0, state: Callable[[], str] = str) -> None:
    """Wait until ``truth`` holds; missing objects count as false. Fail with ``state`` at the timeout."""

    def holds() -> object:
        try:
            return truth()
        except (ApiError, KeyError):
            return False

    wait_until(holds, timeout_s, state)
