"""``helm test``: the operator is ready, and the API server with its webhook would take a job. It makes none.

Arguments: URL of /readyz; URL of the API server; folder of a service account; namespace of the job, or nothing.
"""

import json
import ssl
import sys
import urllib.error
import urllib.request
from pathlib import Path

TIMEOUT_S = 30
JOB = {
    "apiVersion": "dlrm.dev/v1alpha1",
    "kind": "DLRMJob",
    "metadata": {"name": "helm-test"},
    "spec": {
        "model": {
            "denseFeatures": ["I1"],
            "bottomMlp": [4],
            "topMlp": [1],
            "tables": [{"name": "C1", "rows": 100, "dim": 4}],
        },
        "data": {"format": "synthetic", "globalBatchSize": 64},
        "trainer": {"replicas": 1},
        "checkpoint": {"uri": "s3://helm-test/never-written"},
    },
}


def check_ready(url: str) -> None:
    """Ask the operator whether it is ready."""
    with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:
        print("the operator is ready:", answer.read().decode())


def check_job(server: str, account: Path, namespace: str) -> None:
    """Ask the API server for a dry run of a job's creation."""
    request = urllib.request.Request(
        f"{server}/apis/dlrm.dev/v1alpha1/namespaces/{namespace}/dlrmjobs?dryRun=All",
        data=json.dumps(JOB).encode(),
        headers={
            "Authorization": f"Bearer {(account / 'token').read_text().strip()}",
            "Content-Type": "application/json",
        },
        method="POST",
    )
    trusted = ssl.create_default_context(cafile=str(account / "ca.crt"))
    with urllib.request.urlopen(request, timeout=TIMEOUT_S, context=trusted) as answer:
        print("a job would be taken:", json.load(answer)["metadata"]["name"])


def main() -> None:
    """Check both; an answer that is bad ends the process with the server's words."""
    ready, server, account, namespace = sys.argv[1:]
    try:
        check_ready(ready)
        if namespace:
            check_job(server, Path(account), namespace)
    except urllib.error.HTTPError as error:
        sys.exit(f"{error.url}: {error.code}: {error.read().decode()}")


main()
