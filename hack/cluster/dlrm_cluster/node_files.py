"""The files and command lines of what makes a machine a node: pure functions from settings to data."""

from pathlib import Path
from typing import Any

from dlrm_cluster.certificates import Certificates
from dlrm_cluster.components import Argv
from dlrm_cluster.containers import Containers
from dlrm_cluster.network import Network

NODE = "node-1"
LABELS = {"dlrm.dev/pool": "real"}
"""They tell this node from those that kwok pretends beside it."""
DOMAIN = "cluster.local"
DNS_IP = "10.96.0.10"
DNS_PORT = 53
HEARTBEAT_S = 3
LEASE_S = 12
MIN_FREE = "512Mi"
"""Below this much free disk the kubelet evicts pods."""

Object = dict[str, Any]


def kubelet_argv(program: Path, network: Network, folder: Path) -> Argv:
    """Return the command; only ``/var/lib/kubelet/device-plugins`` is outside of ``folder``."""
    return [
        program,
        f"--config={folder / 'kubelet.json'}",
        f"--kubeconfig={folder / 'kubelet.kubeconfig'}",
        f"--root-dir={folder / 'kubelet'}",
        f"--cert-dir={folder / 'pki'}",
        f"--hostname-override={NODE}",
        f"--node-ip={network.node}",
        f"--node-labels={','.join(f'{name}={value}' for name, value in LABELS.items())}",
    ]


def kubelet_config(containers: Containers, certificates: Certificates, folder: Path) -> Object:
    """``KubeletConfiguration`` for control groups of either version that no init system manages.

    Images are never collected: what was loaded by hand cannot be pulled again.
    """
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "containerRuntimeEndpoint": f"unix://{containers.socket}",
        "cgroupDriver": "cgroupfs",
        "cgroupsPerQOS": False,
        "enforceNodeAllocatable": [],
        "failCgroupV1": False,
        "failSwapOn": False,
        "localStorageCapacityIsolation": False,
        "evictionHard": {"memory.available": "100Mi", "nodefs.available": MIN_FREE, "imagefs.available": MIN_FREE},
        "imageGCHighThresholdPercent": 100,
        "imageGCLowThresholdPercent": 99,
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": str(certificates.ca)},
        },
        "authorization": {"mode": "Webhook"},
        "clusterDomain": DOMAIN,
        "clusterDNS": [DNS_IP],
        "resolvConf": str(folder / "resolv.conf"),
        "podLogsDir": str(folder / "pod-logs"),
        "volumePluginDir": str(folder / "volume-plugins"),
        "nodeStatusUpdateFrequency": f"{HEARTBEAT_S}s",
        "nodeLeaseDurationSeconds": LEASE_S,
    }


def proxy_config(network: Network, folder: Path) -> Object:
    """``KubeProxyConfiguration``; limits of connections are the machine's, which a namespace may not set."""
    return {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "clientConnection": {"kubeconfig": str(folder / "kube-proxy.kubeconfig")},
        "mode": "iptables",
        "clusterCIDR": network.pods,
        "hostnameOverride": NODE,
        "conntrack": {"maxPerCore": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
    }


def corefile(network: Network, folder: Path) -> str:
    """Names of the cluster as kubeadm serves them: straight from the API. Names outside do not exist here."""
    return f"""{DOMAIN}:{DNS_PORT} in-addr.arpa:{DNS_PORT} {{
    bind {network.node}
    errors
    kubernetes {DOMAIN} in-addr.arpa {{
        kubeconfig {folder / "coredns.kubeconfig"}
        ttl 30
    }}
}}
.:{DNS_PORT} {{
    bind {network.node}
    errors
    template ANY ANY {{
        rcode NXDOMAIN
    }}
}}
"""


def dns_objects(network: Network) -> list[tuple[str, Object]]:
    """Return the objects that DNS needs in the cluster: (path of the collection, object)."""
    ports = [{"name": f"dns-{protocol.lower()}", "port": DNS_PORT, "protocol": protocol} for protocol in ("UDP", "TCP")]
    labels = {"k8s-app": "kube-dns"}
    reads = [
        {"apiGroups": [""], "resources": ["namespaces", "services"], "verbs": ["list", "watch"]},
        {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list", "watch"]},
    ]
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "system:coredns"}
    user = {"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": "system:coredns"}
    slice_of = {"kubernetes.io/service-name": "kube-dns"}
    return [
        (
            "/api/v1/namespaces/kube-system/services",
            {"metadata": {"name": "kube-dns", "labels": labels}, "spec": {"clusterIP": DNS_IP, "ports": ports}},
        ),
        (
            "/apis/discovery.k8s.io/v1/namespaces/kube-system/endpointslices",
            {
                "metadata": {"name": "kube-dns", "labels": slice_of},
                "addressType": "IPv4",
                "endpoints": [{"addresses": [network.node], "conditions": {"ready": True}}],
                "ports": ports,
            },
        ),
        ("/apis/rbac.authorization.k8s.io/v1/clusterroles", {"metadata": {"name": "system:coredns"}, "rules": reads}),
        (
            "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings",
            {"metadata": {"name": "system:coredns"}, "roleRef": role, "subjects": [user]},
        ),
    ]
