"""A cluster that outlives its command: ``up``, ``down`` and ``status`` of one folder, with a real node or none.

What runs is told by the folder's pid files, which are written the moment a server starts: an ``up`` that was
cut off leaves nothing that ``down`` does not find. A file that names a process of another birth is stale; that
process is somebody else's and is left alone.
"""

from pathlib import Path

from dlrm_cluster import node as nodes
from dlrm_cluster.build import Report, locked, to_stderr
from dlrm_cluster.control_plane import ControlPlane
from dlrm_cluster.errors import ClusterError
from dlrm_cluster.process import ProcessId

DEFAULT_FOLDER = Path(__file__).resolve().parents[1] / ".state"
LOCK = "lock"
NO_NODE = "no node runs here: start one with up --node"
COMPONENTS = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler")


def up(folder: Path, *, node: bool = False, report: Report = to_stderr) -> Path:
    """Have a control plane run in ``folder``, with a real ``node`` if so wished, and return its kubeconfig.

    One that runs whole is left as it is. Of one that runs in part the rest is ended, and a new one starts
    with no data: this is a cluster to throw away.

    Raises:
        ClusterError: it did not start; nothing is left running.
    """
    if node:
        nodes.check(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder / LOCK):
        if not set(expected(folder, node=node)) <= set(running(folder)):
            _end(folder, grace_s=0)  # its data is dropped, and without etcd the API server would not end soon
            _start(folder, node, report)
    return kubeconfig(folder)


def _start(folder: Path, node: bool, report: Report) -> None:
    if not node:
        ControlPlane(folder, outlive_parent=True).start()
        return
    try:
        nodes.Node(folder, report).start()
    except BaseException:
        _end(folder, grace_s=0)
        raise


def expected(folder: Path, *, node: bool = False) -> tuple[str, ...]:
    """Names of the servers that make the cluster in ``folder`` whole; one with a node needs the node's too."""
    return (*COMPONENTS, *nodes.COMPONENTS) if node or nodes.made(folder) else COMPONENTS


def load(folder: Path, archive: Path) -> list[str]:
    """Give the node in ``folder`` the images of an OCI or Docker archive; their names.

    Raises:
        ClusterError: no node, no such archive, or a full disk.
    """
    if "containerd" not in running(folder):
        raise ClusterError(NO_NODE)
    return nodes.containers(folder).load(archive)


def stop_kubelet(folder: Path) -> None:
    """End the node's kubelet, as if the node were lost to the cluster; its containers run on."""
    with locked(folder / LOCK):
        if kubelet := running(folder).get("kubelet"):
            kubelet.end()


def start_kubelet(folder: Path) -> None:
    """Start the node's kubelet again; does nothing while it runs.

    Raises:
        ClusterError: no node was started here.
    """
    if not nodes.made(folder):
        raise ClusterError(NO_NODE)
    with locked(folder / LOCK):
        if "kubelet" not in running(folder):
            nodes.start_kubelet(folder.resolve())


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
    """Return the path of the kubeconfig of a control plane in ``folder``."""
    return folder.resolve() / "kubeconfig"


def _end(folder: Path, grace_s: float) -> list[str]:
    """End the latest started first, so that nothing waits for a storage that is gone."""
    processes = running(folder)
    for process in processes.values():
        process.end(grace_s)
    for file in folder.glob("*.pid"):
        file.unlink()
    nodes.remove(folder)
    return list(processes)
