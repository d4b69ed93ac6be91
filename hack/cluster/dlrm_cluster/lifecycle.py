"""A control plane that outlives its command: ``up``, ``down`` and ``status`` of one folder.

What runs is told by the folder's pid files, which are written the moment a server starts: an ``up`` that was
cut off leaves nothing that ``down`` does not find. A file that names a process of another birth is stale; that
process is somebody else's and is left alone.
"""

from pathlib import Path

from dlrm_cluster.build import locked
from dlrm_cluster.control_plane import ControlPlane
from dlrm_cluster.process import ProcessId

DEFAULT_FOLDER = Path(__file__).resolve().parents[1] / ".state"
LOCK = "lock"
COMPONENTS = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler")


def up(folder: Path) -> Path:
    """Have a control plane run in ``folder`` and return its kubeconfig.

    One that runs whole is left as it is. Of one that runs in part the rest is ended, and a new one starts
    with no data: this is a cluster to throw away.

    Raises:
        ClusterError: it did not start; nothing is left running.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder / LOCK):
        if set(running(folder)) != set(COMPONENTS):
            _end(folder, grace_s=0)  # its data is dropped, and without etcd the API server would not end soon
            ControlPlane(folder, outlive_parent=True).start()
    return kubeconfig(folder)


def down(folder: Path) -> list[str]:
    """End what runs in ``folder`` and return the names of what was ended; logs and data stay."""
    if not folder.is_dir():
        return []
    with locked(folder / LOCK):
        return _end(folder, grace_s=10)


def running(folder: Path) -> dict[str, ProcessId]:
    """Server name -> process, of those that ``folder`` names and that run now; the latest started first."""
    named = {file.stem: ProcessId.read(file) for file in folder.glob("*.pid")}
    alive = {name: process for name, process in named.items() if process is not None}
    return dict(sorted(alive.items(), key=lambda item: item[1].start_ticks, reverse=True))


def kubeconfig(folder: Path) -> Path:
    """Where a control plane in ``folder`` has its kubeconfig."""
    return folder.resolve() / "kubeconfig"


def _end(folder: Path, grace_s: float) -> list[str]:
    """End the latest started first, so that nothing waits for a storage that is gone."""
    processes = running(folder)
    for process in processes.values():
        process.end(grace_s)
    for file in folder.glob("*.pid"):
        file.unlink()
    return list(processes)
