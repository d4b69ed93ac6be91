"""Hardware to choose from, and jobs that may run on each of it."""

from typing import Any

from dlrm_api.hardware import HardwareProfile, parse_profile
from dlrm_testing.operator.model_cluster import ModelCluster
from dlrm_testing.operator.running_job import start_next_attempt, start_training, status


def pool(name: str, price: float, ddr: str = "64Gi", speed: float = 1.0) -> HardwareProfile:
    """Return hardware with all rates, and nodes of its own."""
    rate = 1e9 * speed
    term = {"matchExpressions": [{"key": "pool", "operator": "In", "values": [name]}]}
    return parse_profile(
        {
            "metadata": {"name": name},
            "spec": {
                "nodeAffinityTerms": [term],
                "flopsPerSecond": rate,
                "tiers": {"ddr": {"bytes": ddr, "readBytesPerSecond": rate, "writeBytesPerSecond": rate}},
                "network": {"intraNodeBytesPerSecond": rate, "interNodeBytesPerSecond": rate},
                "pricePerHour": price,
            },
        }
    )


CHEAP, DEAR = pool("cheap", 1), pool("dear", 9)


def job_of_pools(*profiles: HardwareProfile, **objective: Any) -> ModelCluster:
    """Return a cluster with a job that may run on each of some hardware."""
    names = [profile.metadata.name for profile in profiles]
    trainer = {"objective": {"maxReplicas": 2, **objective}, "hardwareProfiles": names}
    cluster = ModelCluster(trainer=trainer, lifecycle={"restart": {"backoff": "0s"}})
    cluster.profiles = profiles
    return cluster


LARGE_TABLE = {"name": "a", "rows": 10**7, "dim": 64}


def tiered_pool(ddr: str) -> HardwareProfile:
    """Return hardware with block storage below its DDR."""
    block = {"bytes": "64Gi", "hostPath": "/block", "readBytesPerSecond": 1e9}
    return parse_profile({"metadata": {"name": "pool"}, "spec": {"tiers": {"ddr": {"bytes": ddr}, "block": block}}})


def training_on(ddr: str, replan: str = "never") -> ModelCluster:
    """Return a cluster whose job trains a large table on two such nodes."""
    cluster = ModelCluster(
        model={"interaction": "dcn", "topMlp": [8, 1], "tables": [LARGE_TABLE]},
        trainer={"replicas": 2, "hardware": "pool"},
        lifecycle={"replan": replan, "restart": {"backoff": "0s", "inPlace": False}},
    )
    cluster.profiles = (tiered_pool(ddr),)
    start_training(cluster)
    return cluster


def restart_on(cluster: ModelCluster, ddr: str) -> None:
    """Lose a pod, and start the next attempt with other memory in the HardwareProfile."""
    cluster.delete(f"demo-trainer-{max(status(cluster).attempt, 1)}-0")
    cluster.profiles, cluster.asked, cluster.planning = (tiered_pool(ddr),), None, None
    start_next_attempt(cluster)
