"""The project as its users install it on a real node: chart, built images, an S3 server in the cluster."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from dlrm_cluster.build import binaries
from dlrm_cluster.errors import ClusterError
from dlrm_cluster.images import write_image
from dlrm_cluster.project_images import Image, build
from dlrm_cluster.real_cluster import RealCluster
from dlrm_testing.e2e.drilled_jobs import DrilledJob
from dlrm_testing.e2e.release import Release
from dlrm_testing.e2e.s3_in_cluster import IMAGE, ClusterS3

LOOKS = (
    ("get", "dlrmjobs,pods", "--all-namespaces", "--output=wide"),
    ("get", "events", "--all-namespaces", "--sort-by=.lastTimestamp"),
    ("logs", "deployment/dlrm-dlrm-operator", "--namespace=dlrm-system", "--tail=60"),
    ("logs", "--selector=dlrm.dev/role=trainer", "--all-containers", "--prefix", "--tail=20"),
)
"""What is shown of the cluster, which ends with the tests, where one of them fails."""
BUILDER = ThreadPoolExecutor(1)
IMAGES = pytest.StashKey[Future[list[Image]]]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add what the cluster looked like to the report of a test that failed."""
    report = yield
    cluster = item.funcargs.get("real_node") if isinstance(item, pytest.Function) else None
    if report.failed and isinstance(cluster, RealCluster):
        for words in LOOKS:
            try:
                said = cluster.kubectl(*words)
            except ClusterError as error:
                said = str(error)
            report.sections.append((f"kubectl {' '.join(words)}", said))
    return report


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start to build the images, a core's work, beside what other fixtures build first."""
    if any("release" in getattr(item, "fixturenames", ()) for item in session.items):
        session.stash[IMAGES] = BUILDER.submit(build)


@pytest.fixture(scope="session")
def store(real_node: RealCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterS3]:
    """Run an S3 server in the cluster, with the example's bucket and the Secret of its keys."""
    folder = tmp_path_factory.mktemp("s3")
    archive = folder / "image.tar"
    program = binaries("versitygw") / "versitygw"
    real_node.load(write_image(archive, IMAGE, {"/bin/versitygw": program}, ("/bin/versitygw",)))
    for name in ("data", "metadata"):
        (folder / "store" / name).mkdir(parents=True)
    server = ClusterS3(real_node, folder / "store")
    server.start()
    yield server
    server.stop()


@pytest.fixture(scope="session")
def release(real_node: RealCluster, helm: Path, request: pytest.FixtureRequest) -> Iterator[Release]:
    """Install the chart with the images that are built here."""
    for image in request.session.stash[IMAGES].result():
        real_node.load(image.archive)
    found = Release(helm, real_node.kubeconfig)
    found.helm("install", "--create-namespace")
    yield found
    found.uninstall()


@pytest.fixture
def new_job(
    release: Release, store: ClusterS3, real_node: RealCluster, folder_of_jobs: Path
) -> Iterator[Callable[[str], DrilledJob]]:
    """Makes jobs; they are deleted when the test ends."""
    made: list[DrilledJob] = []

    def make(name: str) -> DrilledJob:
        made.append(DrilledJob(real_node, folder_of_jobs, name))
        return made[-1]

    yield make
    for job in made:
        real_node.kubectl("delete", "dlrmjob", job.name, "--namespace=default", "--ignore-not-found", "--wait")


@pytest.fixture(scope="session")
def folder_of_jobs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the directory for jobs' steps and samples; pods, which run as nobody, can write it."""
    folder = tmp_path_factory.mktemp("jobs")
    for parent in (folder, *folder.parents[:2]):
        parent.chmod(0o755)
    return folder


@pytest.fixture(scope="session")
def undisturbed(release: Release, store: ClusterS3, real_node: RealCluster, folder_of_jobs: Path) -> dict[int, float]:
    """Losses by step of the job that nobody disturbs."""
    job = DrilledJob(real_node, folder_of_jobs, "undisturbed")
    job.start()
    job.finish()
    losses = job.losses()
    real_node.kubectl("delete", "dlrmjob", job.name, "--namespace=default", "--wait")
    return losses
