"""Run the coscheduling or Volcano scheduler on a test's control plane."""

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
"""Retry interval for unschedulable pods. The default is five minutes, and a new node does not trigger a retry."""
PERMIT_TIMEOUT_S = 5
"""How long coscheduling reserves nodes for some pods of a gang while it schedules the others."""
CLIENT = ("--kube-api-qps=500", "--kube-api-burst=1000")


class GangScheduler:
    """Run a scheduler while the context lasts. Its CRDs stay.

    Args:
        name: Recipe that builds it.
        control_plane: Control plane whose pods it schedules.
        folder: Folder for its log and configuration.

    Raises:
        MissingToolError: it is not built.
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
    """Return the CRD files of a scheduler, from its own module."""
    if name == "coscheduling":
        return [
            module_folder(name, "sigs.k8s.io/scheduler-plugins") / "config/crd/bases/scheduling.x-k8s.io_podgroups.yaml"
        ]
    folder = module_folder(name, "volcano.sh/volcano") / "config/crd/volcano/bases"
    return sorted([*folder.glob("scheduling.*.yaml"), *folder.glob("nodeinfo.*.yaml")])


def coscheduling(programs: Path, kubeconfig: Path, folder: Path) -> list[str | Path]:
    """Return the command of kube-scheduler with the plugin, under the name that its chart uses."""
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
    """Return the command of Volcano's scheduler with its defaults, without a port."""
    flags = (f"--kubeconfig={kubeconfig}", "--leader-elect=false", "--cache-dumper=false", *CLIENT)
    return [programs / "vc-scheduler", *flags]


SCHEDULERS: dict[str, Callable[[Path, Path, Path], list[str | Path]]] = {
    "coscheduling": coscheduling,
    "volcano": volcano,
}
