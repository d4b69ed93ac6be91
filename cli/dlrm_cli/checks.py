"""What can be known to be wrong before any process is started, and costs next to nothing to look at."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import unquote, urlsplit

from dlrm_api.errors import DeviceError, InvalidSpecError, NoInputError, NoPermissionError
from dlrm_api.hardware import DeviceSpec, HardwareProfile, HardwareProfileSpec, ProfileMeta, TierSpec, TiersSpec
from dlrm_api.job import DLRMJob, DLRMJobSpec
from dlrm_api.names import Env
from dlrm_api.objects import file_path, is_s3
from dlrm_api.plan import Plan
from dlrm_api.process import free_memory_bytes
from dlrm_checkpointer import store_options
from dlrm_stores.base import (
    CHECKPOINT_FIELDS,
    PUBLISH_FIELDS,
    FieldNames,
    ObjectStore,
    open_store,
    open_target,
)

PATTERN = frozenset("*?[")
HERE = FieldNames(
    credentials=(
        f"{Env.CREDENTIALS_DIR} to a folder with accessKeyId and secretAccessKey (spec.checkpoint.credentialsSecret is "
        "read in a cluster alone)"
    )
)
FILE_TIERS = frozenset({"cxl", "scm", "block"})
RESOURCE = "nvidia.com/gpu"
"""What NVIDIA's device plugin calls GPUs."""
ASK_GPUS = """
import json, torch
seen = (torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count()))
print(json.dumps([(each.name, each.total_memory) for each in seen]))
"""
"""A program of its own: who asks CUDA keeps some memory of each GPU."""


@dataclass(frozen=True)
class DetectedGpu:
    """One GPU."""

    name: str
    bytes: int
    """Of its memory."""


def check_inputs(spec: DLRMJobSpec) -> None:
    """Look whether the files that the job names are there; the trainer reads what is in them.

    Raises:
        NoInputError: one is not there; names the field.
        NoPermissionError: one lies in a folder that may not be entered.
        InvalidSpecError: one is a URI that this machine can't read.
    """
    if spec.data.format != "synthetic":
        for split, uris in (("train", spec.data.train.uris), ("eval", spec.data.eval.uris)):
            option = "--data" if split == "train" else "--eval-data"
            for i, uri in enumerate(uris):
                _check_file(f"spec.data.{split}.uris[{i}]", uri, f"give the data with {option}")
    elif spec.data.synthetic.reuse_histogram is not None:
        _check_file("spec.data.synthetic.reuseHistogram", spec.data.synthetic.reuse_histogram, "mend the path")
    for field, s3 in (("spec.data.s3", spec.data.s3), ("spec.checkpoint.s3", spec.checkpoint.s3)):
        if s3.ca_file is not None:
            _check_file(f"{field}.caFile", s3.ca_file, "mend the path")


def reach_store(job: DLRMJob) -> ObjectStore:
    """Open the job's store and ask it something, so that a wrong endpoint or key is told before training starts.

    The store that the job publishes to is asked too.

    Raises:
        InvalidSpecError: one can't be used; names the field.
        StoreUnavailableError: nobody answers.
        NoPermissionError: the credentials, or the folder's mode, don't allow it.
        NoInputError: the bucket is not there.
    """
    options, publish = replace(store_options(job, os.environ), fields=HERE), job.spec.checkpoint.publish
    store = open_store(job.spec.checkpoint.uri, options)
    _ask(store, CHECKPOINT_FIELDS.uri)
    if publish is not None:
        _ask(open_target(publish.uri, options, store), PUBLISH_FIELDS.uri)
    return store


def detected_gpus() -> tuple[DetectedGpu, ...]:
    """The GPUs that a process of this machine sees; none where torch sees none.

    Raises:
        DeviceError: the driver does not answer as it should.
    """
    asked = subprocess.run([sys.executable, "-P", "-c", ASK_GPUS], capture_output=True, text=True, check=False)
    if asked.returncode:
        last = asked.stderr.strip().splitlines()[-1:] or [f"exit code {asked.returncode}"]
        raise DeviceError(f"this machine's GPUs can't be asked for: {last[0]}")
    return tuple(DetectedGpu(name, size) for name, size in json.loads(asked.stdout))


def this_machine(replicas: int, devices: Sequence[DetectedGpu] = ()) -> HardwareProfile:
    """A profile of this machine, shared by the pods that it plays: its free memory and GPUs, which a plan must fit."""
    spec = HardwareProfileSpec(tiers=TiersSpec(ddr=TierSpec(bytes=free_memory_bytes() // replicas)))
    if each := len(devices) // replicas:
        hbm = TierSpec(bytes=min(device.bytes for device in devices))
        spec = spec.model_copy(update={"devices": DeviceSpec(resource=RESOURCE, count=each, hbm=hbm)})
    return HardwareProfile(metadata=ProfileMeta(name="this-machine"), spec=spec)


def make_tier_folders(folder: Path, plan: Plan) -> None:
    """Make the folder of each tier whose rows lie in files, if the plan uses any.

    Raises:
        NoPermissionError: one can't be made or written; names the folder.
        DeviceError: its file system has less room than the plan needs; names the bytes.
    """
    needed: Counter[str] = Counter()
    for rank in plan.ranks:
        needed.update({tier: size for tier, size in rank.bytes_per_tier.items() if tier in FILE_TIERS})
    devices: Counter[int] = Counter()
    for tier, size in needed.items():  # all are looked at before one is made: a refusal leaves nothing
        place = folder / tier
        there = _there(place)
        if not there.is_dir():
            raise NoPermissionError(f"{place}: {there} is a file: choose another folder with --tier-dir")
        if not os.access(there, os.W_OK | os.X_OK):
            raise NoPermissionError(f"{there}: no permission to write: choose another folder with --tier-dir")
        devices[there.stat().st_dev] += size
        free, taken = shutil.disk_usage(there).free, devices[there.stat().st_dev]
        if taken > free:
            raise DeviceError(
                f"{place}: rows below DDR take {taken} bytes there and {free} are free: free {taken - free} bytes, "
                f"choose another folder with --tier-dir, or give more of spec.trainer.tierBudgets.ddr"
            )
    for tier in needed:
        try:
            (folder / tier).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise NoPermissionError(
                f"{folder / tier}: {error.strerror}: choose another folder with --tier-dir"
            ) from error


def _there(path: Path) -> Path:
    """The path, or what is there of those above it."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def _check_file(field: str, uri: str, mend: str) -> None:
    if is_s3(uri) and ".uris[" in field:
        return  # the trainer asks the service
    here = file_path(uri)
    if here is None:
        raise InvalidSpecError(field, f"{uri}: can't be read from there: give a path or file:///path")
    try:
        path = Path(here).expanduser()
    except RuntimeError as error:  # a ~ of a user who is not here
        raise NoInputError(f"{field}: {uri}: no such user: {mend}") from error
    if PATTERN & set(str(path)):
        return
    try:
        path.stat()
    except PermissionError as error:
        raise NoPermissionError(
            f"{field}: {path}: no permission to look there: change the owner or mode of the folders above it"
        ) from error
    except (OSError, ValueError) as error:  # also names that no file can have
        raise NoInputError(f"{field}: {path}: no such file or folder: {mend}") from error


def _ask(store: ObjectStore, field: str) -> None:
    """List something; a store in files must have a folder that can be written, or made in one."""
    parts = urlsplit(store.uri)
    if parts.scheme == "file":
        _check_folder(Path(unquote(parts.path)), field)
    for _ in store.list("attempts/"):
        break


def _check_folder(folder: Path, field: str) -> None:
    place = _there(folder)
    if not place.is_dir():
        raise InvalidSpecError(field, f"{place} is a file: choose a folder")
    if not os.access(place, os.W_OK | os.X_OK):
        raise NoPermissionError(f"{field}: {place}: no permission to write: choose a folder that you may")
