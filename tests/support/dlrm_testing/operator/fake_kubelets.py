"""kwok, which plays the kubelets of chosen nodes: their pods run once bound, and end once deleted."""

from pathlib import Path

from dlrm_cluster.build import binaries
from dlrm_cluster.control_plane import ControlPlane
from dlrm_cluster.process import Server

FAKE = {"kwok.x-k8s.io/node": "fake"}
"""Annotation of the nodes that kwok manages."""


def kwok_server(control_plane: ControlPlane, folder: Path) -> Server:
    """Return kwok, not started yet. Nothing answers at its pods' addresses, which are on loopback.

    Raises:
        MissingToolError: it is not built.
    """
    selector = ",".join(f"{key}={value}" for key, value in FAKE.items())
    flags = [f"--manage-nodes-with-annotation-selector={selector}", "--cidr=127.100.0.0/16"]
    argv = [binaries("kwok") / "kwok", f"--kubeconfig={control_plane.kubeconfig}", *flags]
    # It reads settings from its home.
    return Server("kwok", argv, folder, env={"HOME": str(folder)})
