"""kwok, which plays the kubelets of chosen nodes: their pods run once bound, and end once deleted."""

from collections.abc import Sequence
from pathlib import Path

from dlrm_cluster.build import binaries, module_folder
from dlrm_cluster.control_plane import ControlPlane
from dlrm_cluster.process import Server

FAKE = {"kwok.x-k8s.io/node": "fake"}
"""Annotation of the nodes that kwok manages."""


def kwok_server(control_plane: ControlPlane, folder: Path, stages: Sequence[str] = ()) -> Server:
    """Return kwok, not started yet. Nothing answers at its pods' addresses, which are on loopback.

    Args:
        control_plane: Control plane whose nodes it manages.
        folder: Folder for its log.
        stages: Files of kwok's own stages to play instead of its default ones.

    Raises:
        MissingToolError: it is not built.
    """
    selector = ",".join(f"{key}={value}" for key, value in FAKE.items())
    flags = [f"--manage-nodes-with-annotation-selector={selector}", "--cidr=127.100.0.0/16"]
    if stages:
        known, config = module_folder("kwok", "sigs.k8s.io/kwok") / "kustomize" / "stage", folder / "stages.yaml"
        config.write_text("---\n".join((known / stage).read_text() for stage in stages))
        flags.append(f"--config={config}")
    argv = [binaries("kwok") / "kwok", f"--kubeconfig={control_plane.kubeconfig}", *flags]
    # It reads settings from its home.
    return Server("kwok", argv, folder, env={"HOME": str(folder)})
