"""A cluster whose pods run, for tests: reached by kubectl, as its user reaches it."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from dlrm_cluster import lifecycle
from dlrm_cluster.build import OLDEST_KUBERNETES, TOOLS, binaries
from dlrm_cluster.errors import ClusterError, MissingToolError
from dlrm_cluster.images import write_image
from dlrm_cluster.node import BUSYBOX

Object = dict[str, Any]
OWN_FOLDER = TOOLS.parent / ".state" / "e2e"
POLL_S = 0.25
T = TypeVar("T")


class RealCluster:
    """Call the cluster of a kubeconfig.

    ``folder`` is where ``up --node`` made it; None for a cluster of somebody else, whose node's processes are out of
    reach and whose images come from registries. ``program`` is its kubectl.
    """

    def __init__(self, kubeconfig: Path) -> None:
        self.kubeconfig = kubeconfig.resolve()
        made_here = (self.kubeconfig.parent / "kubelet.pid").exists()
        self.folder = self.kubeconfig.parent if made_here else None
        found = None if made_here else shutil.which("kubectl")
        self.program = Path(found) if found else binaries(OLDEST_KUBERNETES) / "kubectl"

    def kubectl(self, *words: str, stdin: str | None = None, timeout_s: float = 120.0) -> str:
        """Return the output of kubectl.

        Raises:
            ClusterError: it failed; the message is what it said.
        """
        command = [str(self.program), f"--kubeconfig={self.kubeconfig}", *words]
        answer = subprocess.run(command, input=stdin, capture_output=True, text=True, check=False, timeout=timeout_s)
        if answer.returncode != 0:
            raise ClusterError(f"kubectl {' '.join(words)}: {answer.stderr.strip()}")
        return answer.stdout

    def get(self, *words: str) -> Object:
        """One object, or a list object."""
        found: Object = json.loads(self.kubectl("get", *words, "--output=json"))
        return found

    def apply(self, *objects: Object) -> None:
        """Create or change objects."""
        for body in objects:
            self.kubectl("apply", "--server-side", "--filename=-", stdin=json.dumps(body))

    def eventually(self, look: Callable[[], T], timeout_s: float, what: str) -> T:
        """Wait until ``look`` returns something true and return it; an API error counts as not yet.

        Raises:
            AssertionError: time ran out; the message tells ``what`` was waited for and what was seen last.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                if seen := look():
                    return seen
                last: object = seen
            except ClusterError as error:
                last = error
            assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}; last seen: {last}"
            time.sleep(POLL_S)

    def load(self, archive: Path) -> None:
        """Give the node an image archive; needs a node of ours."""
        lifecycle.load(self.own_folder(), archive)

    def busybox(self, scratch: Path) -> str:
        """Return the name of an image with busybox; on our own node it holds kubectl too."""
        if self.folder is None:
            return "docker.io/library/busybox:1.36"
        name = "dlrm.local/busybox:1"
        programs = {"/bin/busybox": BUSYBOX, "/bin/sh": BUSYBOX, "/bin/kubectl": self.program}
        self.load(write_image(scratch / "busybox.tar", name, programs, ("sh",)))
        return name

    def own_folder(self) -> Path:
        """Return the folder of a cluster that ``up --node`` made.

        Raises:
            MissingToolError: it is somebody else's cluster.
        """
        if self.folder is None:
            raise MissingToolError("this test reaches into the node: it needs the cluster of make cluster-up NODE=1")
        return self.folder

    @contextmanager
    def without_kubelet(self) -> Iterator[None]:
        """End the node's kubelet, and start it again as it was at the end; containers run on meanwhile."""
        folder = self.own_folder()
        _run("kubelet", "stop", folder)
        try:
            yield
        finally:
            _run("kubelet", "start", folder)


@contextmanager
def cluster_for_tests() -> Iterator[RealCluster]:
    """Yield the cluster of ``KUBECONFIG``, or one of our own that ends with the tests.

    Raises:
        MissingToolError: no cluster is named, and this machine cannot have a node.
    """
    if named := os.environ.get("KUBECONFIG"):
        yield RealCluster(Path(named))
        return
    if os.geteuid() != 0:
        raise MissingToolError("real pods need root, or the KUBECONFIG of a cluster that has them")
    try:
        _run("up", "--node", OWN_FOLDER)
        yield RealCluster(lifecycle.kubeconfig(OWN_FOLDER))
    finally:
        lifecycle.down(OWN_FOLDER)


def _run(command: str, argument: str, folder: Path) -> None:
    """Run a command of this package in a process of its own, which is not the parent of what it starts."""
    argv = [sys.executable, "-m", "dlrm_cluster", command, argument, "--dir", str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(TOOLS.parent)}
    answer = subprocess.run(argv, env=environment, stdout=subprocess.DEVNULL, check=False)
    if answer.returncode != 0:
        raise ClusterError(f"dlrm_cluster {command} {argument} failed; it has said why on stderr")
