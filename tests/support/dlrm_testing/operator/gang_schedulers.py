"""The schedulers of coscheduling and of Volcano beside a test's control plane: their kinds, one process."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from dlrm_cluster.build import built, module_folder
from dlrm_cluster.control_plane import ControlPlane
from dlrm_cluster.process import Server
from dlrm_testing.operator.definitions import install_crds

Object = dict[str, Any]
RETRY_INTERVAL_S = 5
"""When coscheduling looks again at pods that it turned away; by default after five minutes, for a new node is none of
the events that it waits for."""
PERMIT_TIMEOUT_S = 5
"""How long coscheduling keeps the room that it found for some pods of a gang while it looks for the others'."""
CLIENT = ("--kube-api-qps=500", "--kube-api-burst=1000")


class GangScheduler:
    """One of them; it runs while it is entered, and leaves its kinds behind.

    Args:
        name: of the recipe that builds it.
        control_plane: whose pods it looks at.
        folder: for its log and configuration.

    Raises:
        MissingToolError: nobody has built it.
    """

    def __init__(self, name: str, control_plane: ControlPlane, folder: Path) -> None:
        self.name = name
        self._api = control_plane.api
        argv = SCHEDULERS[name](built(name), control_plane.kubeconfig, folder)
        self.server = Server(name, argv, folder)

    def __enter__(self) -> "GangScheduler":
        install_crds(self._api, *(yaml.safe_load(path.read_text()) for path in definitions(self.name)))
        self.server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.stop()


def definitions(name: str) -> list[Path]:
    """Files of the kinds that a scheduler looks at, from its own module."""
    if name == "coscheduling":
        return [
            module_folder(name, "sigs.k8s.io/scheduler-plugins") / "config/crd/bases/scheduling.x-k8s.io_podgroups.yaml"
        ]
    folder = module_folder(name, "volcano.sh/volcano") / "config/crd/volcano/bases"
    return sorted([*folder.glob("scheduling.*.yaml"), *folder.glob("nodeinfo.*.yaml")])


def coscheduling(programs: Path, kubeconfig: Path, folder: Path) -> list[str | Path]:
    """Kubernetes' scheduler with the plugin, under the name that the project's own chart gives it."""
    profile = {
        "schedulerName": "scheduler-plugins-scheduler",
        "plugins": {
            "multiPoint": {"enabled": [{"name": "Coscheduling"}]},
            "queueSort": {"enabled": [{"name": "Coscheduling"}], "disabled": [{"name": "*"}]},
        },
        "pluginConfig": [{"name": "Coscheduling", "args": {"permitWaitingTimeSeconds": PERMIT_TIMEOUT_S}}],
    }
    config = {
        "apiVersion": "kubescheduler.config.k8s.io/v1",
        "kind": "KubeSchedulerConfiguration",
        "leaderElection": {"leaderElect": False},
        "clientConnection": {"kubeconfig": str(kubeconfig), "qps": 500, "burst": 1_000},
        "profiles": [profile],
    }
    (folder / "coscheduling.yaml").write_text(json.dumps(config))
    flags = (f"--config={folder / 'coscheduling.yaml'}", "--secure-port=0")
    return [programs / "kube-scheduler", *flags, f"--pod-max-in-unschedulable-pods-duration={RETRY_INTERVAL_S}s"]


def volcano(programs: Path, kubeconfig: Path, folder: Path) -> list[str | Path]:
    """Volcano's scheduler with its own defaults; it opens no port."""
    flags = (f"--kubeconfig={kubeconfig}", "--leader-elect=false", "--cache-dumper=false", *CLIENT)
    return [programs / "vc-scheduler", *flags]


SCHEDULERS: dict[str, Callable[[Path, Path, Path], list[str | Path]]] = {
    "coscheduling": coscheduling,
    "volcano": volcano,
}
