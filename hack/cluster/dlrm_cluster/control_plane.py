"""etcd, kube-apiserver, kube-controller-manager and kube-scheduler as processes on loopback ports.

There is no kubelet here (``node.py`` adds one): a node is an object that a test creates, and a pod that was bound
to one changes only as the test writes its status.
"""

import secrets
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, TracebackType

from dlrm_cluster import components
from dlrm_cluster.api import Api
from dlrm_cluster.build import binaries
from dlrm_cluster.certificates import write_certificates
from dlrm_cluster.components import Account, Argv, Layout
from dlrm_cluster.errors import PortTakenError
from dlrm_cluster.network import Network
from dlrm_cluster.ports import LOOPBACK, free_port, listens
from dlrm_cluster.process import Server

NODE_GRACE_S = 86_400.0
PORT_CHOICES = 5
OWN_PORTS = (6443, 2379, 2380)
"""Of the API server, etcd and etcd's peers where nobody else is: in a network of their own."""
NO_ARGS: Mapping[str, Sequence[str]] = MappingProxyType({})


class ControlPlane:
    """One control plane with its data in ``work_dir``; a context manager.

    Args:
        work_dir: Certificates, data and each process's log; an earlier control plane's data there is dropped.
        kubernetes: Recipe that its programs are built by, which is its version.
        network: Where all of it runs, so that pods reach it; without one, on this machine's loopback.
        audit: Write ``audit_log``, one line a call.
        node_grace_s: How long a silent node stays Ready. The default lets nodes without a kubelet live.
        accounts: Users beside the administrator.
        extra_args: Component name -> further flags; they win over ours.
        outlive_parent: Keep running when this process ends.
    """

    def __init__(
        self,
        work_dir: Path,
        *,
        kubernetes: str = "kubernetes",
        network: Network | None = None,
        audit: bool = False,
        node_grace_s: float = NODE_GRACE_S,
        accounts: Sequence[Account] = (),
        extra_args: Mapping[str, Sequence[str]] = NO_ARGS,
        outlive_parent: bool = False,
    ) -> None:
        self.work_dir = work_dir.resolve()
        self.servers: dict[str, Server] = {}
        self.token = secrets.token_hex(16)
        self._kubernetes = kubernetes
        self._network = network
        self._accounts = accounts
        self._audit = audit
        self._node_grace_s = node_grace_s
        self._extra_args = extra_args
        self._outlive_parent = outlive_parent
        self._layout: Layout | None = None

    @property
    def layout(self) -> Layout:
        """Files and ports; they are chosen by ``start``."""
        assert self._layout is not None, "start() it first"
        return self._layout

    @property
    def server(self) -> str:
        """Return the API server's URL."""
        return self.layout.server

    @property
    def ca(self) -> Path:
        """Return the authority that signed the API server's certificate (PEM)."""
        return self.layout.certificates.ca

    @property
    def kubeconfig(self) -> Path:
        """Return a kubeconfig for an administrator (group ``system:masters``)."""
        return self.layout.kubeconfig

    @property
    def audit_log(self) -> Path:
        """One JSON object a line, when ``audit`` is on."""
        return self.layout.audit_log

    @property
    def kubectl(self) -> Path:
        """Return the kubectl of the cluster's version; pass it ``--kubeconfig``."""
        return binaries(self._kubernetes) / "kubectl"

    @property
    def api(self) -> Api:
        """Plain JSON calls as the administrator."""
        return Api(self.server, self.ca, self.token)

    def start(self) -> None:
        """Build what is missing, start everything, and return once pods can be created and scheduled.

        Does nothing between a ``start`` and its ``stop``.

        Raises:
            MissingToolError: the servers must be built and Go is absent or too old.
            BuildError: a server did not build.
            StartError: a server ended or was not ready in time; nothing is left running.
        """
        if self.servers:
            return
        for attempt in range(PORT_CHOICES):
            try:
                self._start_once()
            except BaseException as error:
                self.stop()
                if isinstance(error, PortTakenError) and attempt + 1 < PORT_CHOICES:
                    continue
                raise
            return

    def _start_once(self) -> None:
        etcd, kubernetes = binaries("etcd"), binaries(self._kubernetes)
        layout = self._layout = self._new_layout()
        components.write_files(layout, [components.administrator(self.token), *self._accounts])
        api_argv = components.apiserver_argv(kubernetes / "kube-apiserver", layout, audit=self._audit)
        manager_argv = components.controller_manager_argv(
            kubernetes / "kube-controller-manager", layout, node_grace_s=self._node_grace_s
        )
        self._launch("etcd", components.etcd_argv(etcd / "etcd", layout), layout.etcd_port)
        self._launch("kube-apiserver", api_argv, layout.api_port)
        self.wait_ready()
        self._launch("kube-controller-manager", manager_argv)
        self._launch("kube-scheduler", components.scheduler_argv(kubernetes / "kube-scheduler", layout))
        self.wait_for("/api/v1/namespaces/default/serviceaccounts/default", "kube-controller-manager")

    def _new_layout(self) -> Layout:
        """Drop an earlier control plane's data and logs, choose ports, make certificates."""
        self.work_dir.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(self.work_dir / components.ETCD_DATA, ignore_errors=True)
        for log in self.work_dir.glob("*.log"):
            log.unlink()
        address = self._network.node if self._network else LOOPBACK
        hosts = (address, "localhost", components.SERVICE_IP, "kubernetes.default.svc")
        api_port, etcd_port, etcd_peer_port = OWN_PORTS if self._network else (free_port() for _ in OWN_PORTS)
        return Layout(
            work_dir=self.work_dir,
            address=address,
            api_port=api_port,
            etcd_port=etcd_port,
            etcd_peer_port=etcd_peer_port,
            certificates=write_certificates(self.work_dir, hosts),
        )

    def _launch(self, name: str, argv: Argv, port: int | None = None) -> None:
        """Start one server and, where it has a port, wait until it is the one that listens there."""
        enter = self._network.enter if self._network else []
        argv = [*enter, *argv, *self._extra_args.get(name, ())]
        server = Server(name, argv, self.work_dir, outlive_parent=self._outlive_parent)
        self.servers[name] = server
        server.start()
        if port is not None:
            server.wait_until(lambda: (found := server.identity) is not None and listens(found.pid, port))

    def wait_ready(self) -> None:
        """Return once the API server says that it is ready, for instance after a restart of it."""
        self.wait_for("/readyz", "kube-apiserver")

    def wait_for(self, path: str, by: str) -> None:
        """Return once the API has ``path``; ``by`` is the component that makes it and its log tells why not."""
        api = self.api
        self.servers[by].wait_until(lambda: api.found(path))

    def stop(self) -> None:
        """End every process, the API server before its storage. Repeating it does nothing."""
        for server in reversed(self.servers.values()):
            server.stop()
        self.servers.clear()

    def __enter__(self) -> "ControlPlane":
        """Start it."""
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop it."""
        self.stop()
