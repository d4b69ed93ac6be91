"""The command lines and files of each part of the control plane: pure functions from settings to data."""

import ipaddress
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlrm_cluster.certificates import MASTERS, Certificates
from dlrm_cluster.ports import LOOPBACK

ADMIN = "dlrm-admin"
CLUSTER = "dlrm-test"
SERVICE_IP_RANGES = "10.96.0.0/16,fd00:10:96::/112"
"""Services of both families; the first is the default one."""
SERVICE_IP = "10.96.0.1"
ISSUER = "https://kubernetes.default.svc.cluster.local"
NODE_LABELS = {"kubernetes.io/os": "linux", "kubernetes.io/arch": "amd64"}
"""Labels that a kubelet sets and pods may select; a node without a kubelet needs them as well."""
ETCD_DATA = "etcd-data"
AUDIT_MIB = 100_000
"""The log's size at which the API server would begin another file; by default 100 MiB, which a session may exceed."""
CLIENT_QPS, CLIENT_BURST = 1_000, 2_000
"""The components' own limits (20 to 50 calls a second) would be what a test at scale measures."""

Argv = list[str | Path]


@dataclass(frozen=True)
class Account:
    """Describe a user of the API with a static token; an account of one node is in the group of nodes."""

    name: str
    group: str
    token: str


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Name the files and ports of one control plane."""

    work_dir: Path
    address: str
    api_port: int
    etcd_port: int
    etcd_peer_port: int
    certificates: Certificates

    @property
    def server(self) -> str:
        """Return the API server's URL."""
        return f"https://{self.address}:{self.api_port}"

    @property
    def etcd(self) -> str:
        """Return the store's URL; it has no authentication, so it listens on loopback only."""
        return f"http://{LOOPBACK}:{self.etcd_port}"

    @property
    def kubeconfig(self) -> Path:
        """Return the administrator's kubeconfig."""
        return self.work_dir / "kubeconfig"

    @property
    def tokens(self) -> Path:
        """Return the API server's static token file."""
        return self.work_dir / "tokens.csv"

    @property
    def scheduler_config(self) -> Path:
        """Return the scheduler's configuration file."""
        return self.work_dir / "scheduler.yaml"

    @property
    def audit_log(self) -> Path:
        """One JSON object a line; there when the audit is on."""
        return self.work_dir / "audit.log"

    @property
    def audit_policy(self) -> Path:
        """Return the API server's audit policy file."""
        return self.work_dir / "audit-policy.yaml"


def etcd_argv(program: Path, layout: Layout) -> Argv:
    """Return the command of a single member on loopback that never waits for the disk."""
    client = layout.etcd
    peer = f"http://{LOOPBACK}:{layout.etcd_peer_port}"
    return [
        program,
        f"--data-dir={layout.work_dir / ETCD_DATA}",
        f"--listen-client-urls={client}",
        f"--advertise-client-urls={client}",
        f"--listen-peer-urls={peer}",
        f"--initial-advertise-peer-urls={peer}",
        f"--initial-cluster=default={peer}",
        "--unsafe-no-fsync",
        "--log-level=warn",
    ]


def apiserver_argv(program: Path, layout: Layout, *, audit: bool) -> Argv:
    """RBAC, users by static token, and what ``kubectl logs`` and ``exec`` need to reach a node's kubelet."""
    certificates = layout.certificates
    argv: Argv = [
        program,
        f"--bind-address={layout.address}",
        f"--advertise-address={layout.address}",
        f"--secure-port={layout.api_port}",
        f"--etcd-servers={layout.etcd}",
        f"--tls-cert-file={certificates.server_cert}",
        f"--tls-private-key-file={certificates.server_key}",
        f"--token-auth-file={layout.tokens}",
        "--authorization-mode=Node,RBAC",
        "--kubelet-preferred-address-types=InternalIP",
        f"--kubelet-client-certificate={certificates.kubelet_client_cert}",
        f"--kubelet-client-key={certificates.kubelet_client_key}",
        f"--service-cluster-ip-range={SERVICE_IP_RANGES}",
        f"--service-account-issuer={ISSUER}",
        f"--service-account-key-file={certificates.service_account_key}",
        f"--service-account-signing-key-file={certificates.service_account_key}",
        "--allow-privileged=true",
        "--shutdown-delay-duration=0s",
    ]
    if ipaddress.ip_address(layout.address).is_loopback:
        argv.append("--endpoint-reconciler-type=none")  # a loopback address is refused in an Endpoints object
    if audit:
        argv += [f"--audit-policy-file={layout.audit_policy}", f"--audit-log-path={layout.audit_log}"]
        argv.append(f"--audit-log-maxsize={AUDIT_MIB}")
    return argv


def controller_manager_argv(program: Path, layout: Layout, *, node_grace_s: float) -> Argv:
    """Run all controllers that need no cloud; the manager's own port is off, so that nothing can take it."""
    return [
        program,
        f"--kubeconfig={layout.kubeconfig}",
        "--leader-elect=false",
        "--secure-port=0",
        f"--root-ca-file={layout.certificates.ca}",
        f"--service-account-private-key-file={layout.certificates.service_account_key}",
        f"--node-monitor-grace-period={node_grace_s:g}s",
        f"--kube-api-qps={CLIENT_QPS}",
        f"--kube-api-burst={CLIENT_BURST}",
    ]


def scheduler_argv(program: Path, layout: Layout) -> Argv:
    """Return the command with the default profile and its own port off."""
    return [program, f"--config={layout.scheduler_config}", "--secure-port=0"]


def scheduler_config(layout: Layout) -> dict[str, Any]:
    """``KubeSchedulerConfiguration`` with the default profile."""
    return {
        "apiVersion": "kubescheduler.config.k8s.io/v1",
        "kind": "KubeSchedulerConfiguration",
        "leaderElection": {"leaderElect": False},
        "clientConnection": {"kubeconfig": str(layout.kubeconfig), "qps": CLIENT_QPS, "burst": CLIENT_BURST},
    }


def audit_policy() -> dict[str, Any]:
    """Return a policy that records who asked for what, once a call, without bodies, which hold secrets."""
    return {
        "apiVersion": "audit.k8s.io/v1",
        "kind": "Policy",
        "omitStages": ["RequestReceived"],
        "rules": [{"level": "Metadata"}],
    }


def administrator(token: str) -> Account:
    """Return the account that may do everything."""
    return Account(ADMIN, MASTERS, token)


def kubeconfig(layout: Layout, account: Account) -> dict[str, Any]:
    """Return the kubeconfig of one user."""
    cluster = {"server": layout.server, "certificate-authority": str(layout.certificates.ca)}
    context = {"cluster": CLUSTER, "user": account.name, "namespace": "default"}
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": CLUSTER,
        "clusters": [{"name": CLUSTER, "cluster": cluster}],
        "users": [{"name": account.name, "user": {"token": account.token}}],
        "contexts": [{"name": CLUSTER, "context": context}],
    }


def write_kubeconfig(path: Path, layout: Layout, account: Account) -> Path:
    """Write the kubeconfig of one user; nobody else may read it. JSON is YAML, so no YAML library is needed."""
    path.touch(mode=0o600)
    path.write_text(json.dumps(kubeconfig(layout, account), indent=2))
    return path


def write_files(layout: Layout, accounts: Sequence[Account]) -> None:
    """Write what the components read; the first of ``accounts`` is the administrator."""
    layout.tokens.touch(mode=0o600)
    lines = [f'{account.token},{account.name},{account.name},"{account.group}"\n' for account in accounts]
    layout.tokens.write_text("".join(lines))
    write_kubeconfig(layout.kubeconfig, layout, accounts[0])
    layout.scheduler_config.write_text(json.dumps(scheduler_config(layout), indent=2))
    layout.audit_policy.write_text(json.dumps(audit_policy(), indent=2))
