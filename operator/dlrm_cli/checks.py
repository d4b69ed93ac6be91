"""What can be known to be wrong before any process is started, and costs next to nothing to look at."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import unquote, urlsplit

import psutil

from dlrm_api.errors import InvalidSpecError, NoInputError, NoPermissionError
from dlrm_api.hardware import HardwareProfile, HardwareProfileSpec, ProfileMeta, TierSpec, TiersSpec
from dlrm_api.job import DLRMJob, DLRMJobSpec
from dlrm_checkpointer.settings import store_options
from dlrm_checkpointer.store import ObjectStore, open_store

PATTERN = frozenset("*?[")
CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def check_inputs(spec: DLRMJobSpec) -> None:
    """Look whether the files that the job names are there; the trainer reads what is in them.

    Raises:
        NoInputError: one is not there; names the field.
        InvalidSpecError: one is a URI that this machine can't read.
    """
    if spec.data.format != "synthetic":
        for split, uris in (("train", spec.data.train.uris), ("eval", spec.data.eval.uris)):
            option = "--data" if split == "train" else "--eval-data"
            for i, uri in enumerate(uris):
                _check_file(f"spec.data.{split}.uris[{i}]", uri, f"give the data with {option}")
    elif spec.data.synthetic.reuse_histogram is not None:
        _check_file("spec.data.synthetic.reuseHistogram", spec.data.synthetic.reuse_histogram, "mend the path")
    if spec.checkpoint.ca_file is not None:
        _check_file("spec.checkpoint.caFile", spec.checkpoint.ca_file, "mend the path")


def reach_store(job: DLRMJob) -> ObjectStore:
    """Open the job's store and ask it something, so that a wrong endpoint or key is told before training starts.

    Raises:
        StoreUnavailableError: nobody answers.
        NoPermissionError: the credentials, or the folder's mode, don't allow it.
        NoInputError: the bucket is not there.
    """
    store = open_store(job.spec.checkpoint.uri, store_options(job, os.environ))
    parts = urlsplit(job.spec.checkpoint.uri)
    if parts.scheme == "file":
        _check_folder(Path(unquote(parts.path)))
    for _ in store.list("attempts/"):
        break
    return store


def this_machine(replicas: int) -> HardwareProfile:
    """A profile of this machine, shared by the pods that it plays: its memory alone, which a plan must fit."""
    memory = psutil.virtual_memory().total
    for path in CGROUP_LIMITS:
        text = path.read_text().strip() if path.is_file() else ""
        memory = min(memory, int(text)) if text.isdigit() else memory
    tiers = TiersSpec(ddr=TierSpec(bytes=memory // replicas))
    return HardwareProfile(metadata=ProfileMeta(name="this-machine"), spec=HardwareProfileSpec(tiers=tiers))


def _check_file(field: str, uri: str, mend: str) -> None:
    parts = urlsplit(uri)
    if "://" in uri and (parts.scheme != "file" or parts.netloc not in ("", "localhost")):
        raise InvalidSpecError(field, f"{uri}: only files of this machine can be read: give a path or file:///path")
    path = Path(unquote(parts.path)) if "://" in uri else Path(uri).expanduser()
    if not PATTERN & set(str(path)) and not path.exists():
        raise NoInputError(f"{field}: {path}: no such file or folder: {mend}")


def _check_folder(folder: Path) -> None:
    """The snapshot folder, or the one above that it would be made in, must be a folder that can be written."""
    place = folder
    while not place.exists() and place != place.parent:
        place = place.parent
    if not place.is_dir():
        raise InvalidSpecError("spec.checkpoint.uri", f"{place} is a file: choose a folder for the snapshots")
    if not os.access(place, os.W_OK | os.X_OK):
        raise NoPermissionError(f"spec.checkpoint.uri: {place}: no permission to write: choose a folder that you may")
