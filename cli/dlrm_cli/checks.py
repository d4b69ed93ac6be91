"""Check cheaply, before any process starts, what would make a run on this machine fail."""

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
from dlrm_api.fields import file_path, is_s3
from dlrm_api.hardware import DeviceSpec, HardwareProfile, HardwareProfileSpec, ProfileMeta, TierSpec, TiersSpec
from dlrm_api.job import DLRMJob, DLRMJobSpec
from dlrm_api.names import Env
from dlrm_api.plan import Plan
from dlrm_api.process import free_memory_bytes
from dlrm_api.tiers import FILE_TIERS
from dlrm_api.trainer import TierBudgets
from dlrm_checkpointer import PUBLISH_FIELDS, open_publish_store, store_options
from dlrm_stores import ObjectStore, open_store
from dlrm_stores.base import CHECKPOINT_FIELDS, FieldNames

PATTERN = frozenset("*?[")
HERE = FieldNames(
    credentials=(
        f"{Env.CREDENTIALS_DIR} to a folder with accessKeyId and secretAccessKey (spec.checkpoint.credentialsSecret is "
        "read in a cluster alone)"
    )
)
RESOURCE = "nvidia.com/gpu"
"""Resource name of NVIDIA's device plugin."""
ASK_GPUS = """
import json, torch
seen = (torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count()))
print(json.dumps([(each.name, each.total_memory) for each in seen]))
"""
"""Runs in a process of its own: whoever calls CUDA keeps some memory of each GPU."""


@dataclass(frozen=True)
class DetectedGpu:
    """Describe one GPU: its name and memory."""

    name: str
    bytes: int


def check_inputs(spec: DLRMJobSpec) -> None:
    """Check that the files that the job names exist; the trainer checks what is in them.

    Raises:
        NoInputError: a file does not exist.
        NoPermissionError: a file is in a folder that may not be entered.
        InvalidSpecError: a URI that this machine cannot read.
    """
    if spec.data.format != "synthetic":
        for split, uris in (("train", spec.data.train.uris), ("eval", spec.data.eval.uris)):
            option = "--data" if split == "train" else "--eval-data"
            for i, uri in enumerate(uris):
                _check_file(f"spec.data.{split}.uris[{i}]", uri, f"give the data with {option}")
    elif spec.data.synthetic.reuse_histogram is not None:
        _check_file("spec.data.synthetic.reuseHistogram", spec.data.synthetic.reuse_histogram, "correct the path")
    for field, s3 in (("spec.data.s3", spec.data.s3), ("spec.checkpoint.s3", spec.checkpoint.s3)):
        if s3.ca_file is not None:
            _check_file(f"{field}.caFile", s3.ca_file, "correct the path")


def open_job_store(job: DLRMJob) -> ObjectStore:
    """Open the job's store and list it, so that a wrong endpoint or key fails before training starts.

    The store that the job publishes to is tried too.

    Raises:
        InvalidSpecError: a store's settings are invalid.
        StoreUnavailableError: nobody answers.
        NoPermissionError: the credentials or the folder's mode do not allow it.
        NoInputError: the bucket does not exist.
    """
    options, publish = replace(store_options(job, os.environ), fields=HERE), job.spec.checkpoint.publish
    store = open_store(job.spec.checkpoint.uri, options)
    _ask(store, CHECKPOINT_FIELDS.uri)
    if publish is not None:
        _ask(open_publish_store(publish.uri, options, store), PUBLISH_FIELDS.uri)
    return store


def detect_gpus() -> tuple[DetectedGpu, ...]:
    """Return the GPUs that a process here sees, in torch's order; DeviceError if the driver failed."""
    asked = subprocess.run([sys.executable, "-P", "-c", ASK_GPUS], capture_output=True, text=True, check=False)
    if asked.returncode:
        last = asked.stderr.strip().splitlines()[-1:] or [f"exit code {asked.returncode}"]
        raise DeviceError(f"failed to detect GPUs: {last[0]}")
    return tuple(DetectedGpu(name, size) for name, size in json.loads(asked.stdout))


def this_machine(replicas: int, devices: Sequence[DetectedGpu] = ()) -> HardwareProfile:
    """Return a profile of this machine's free memory and GPUs, shared by the replicas that run on it."""
    spec = HardwareProfileSpec(tiers=TiersSpec(ddr=TierSpec(bytes=free_memory_bytes() // replicas)))
    if each := len(devices) // replicas:
        hbm = TierSpec(bytes=min(device.bytes for device in devices))
        spec = spec.model_copy(update={"devices": DeviceSpec(resource=RESOURCE, count=each, hbm=hbm)})
    return HardwareProfile(metadata=ProfileMeta(name="this-machine"), spec=spec)


def with_rates(machine: HardwareProfile, measured: HardwareProfile, budgets: TierBudgets) -> HardwareProfile:
    """Return a profile of this machine's memory and a job's budgets with the rates of another profile."""
    ours, theirs = machine.spec, measured.spec
    tiers = {"ddr": theirs.tiers.ddr.model_copy(update={"bytes": ours.tiers.ddr.bytes})}
    for tier in FILE_TIERS:
        known, size = getattr(theirs.tiers, tier), getattr(budgets, tier)
        if known is not None and size:
            tiers[tier] = known.model_copy(update={"bytes": size})
    devices = ours.devices
    if devices is not None and theirs.devices is not None:
        hbm = theirs.devices.hbm.model_copy(update={"bytes": devices.hbm.bytes})
        devices = theirs.devices.model_copy(update={"count": devices.count, "hbm": hbm})
    update = {"tiers": TiersSpec(**tiers), "devices": devices}
    return machine.model_copy(update={"spec": theirs.model_copy(update=update)})


def make_tier_folders(folder: Path, plan: Plan) -> None:
    """Make the folder of each tier that the plan stores in files.

    Raises:
        NoPermissionError: a folder cannot be made or written.
        DeviceError: its file system has less space than the plan needs.
    """
    needed: Counter[str] = Counter()
    for rank in plan.ranks:
        needed.update({tier: size for tier, size in rank.bytes_per_tier.items() if tier in FILE_TIERS})
    devices: Counter[int] = Counter()
    # Check all of them before making one: a refusal leaves nothing behind.
    for tier, size in needed.items():
        place = folder / tier
        there = _existing(place)
        if not there.is_dir():
            raise NoPermissionError(f"cannot create {place}: {there} is a file; choose another folder with --tier-dir")
        if not os.access(there, os.W_OK | os.X_OK):
            raise NoPermissionError(f"permission denied: write {there}; choose another folder with --tier-dir")
        devices[there.stat().st_dev] += size
        free, taken = shutil.disk_usage(there).free, devices[there.stat().st_dev]
        if taken > free:
            raise DeviceError(
                f"not enough space in {place}: rows below DDR need {taken} bytes, {free} are free; free "
                f"{taken - free} bytes, choose another folder with --tier-dir, or raise spec.trainer.tierBudgets.ddr"
            )
    for tier in needed:
        try:
            (folder / tier).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise NoPermissionError(
                f"cannot create {folder / tier}: {error.strerror}; choose another folder with --tier-dir"
            ) from error


def _existing(path: Path) -> Path:
    """Return the path, or its nearest ancestor that exists."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def _check_file(field: str, uri: str, fix: str) -> None:
    if is_s3(uri) and ".uris[" in field:
        # The trainer asks the service.
        return
    here = file_path(uri)
    if here is None:
        raise InvalidSpecError(field, f"expected a path or file:///path, got {uri!r}")
    try:
        path = Path(here).expanduser()
    except RuntimeError as error:
        # A ~ of an unknown user.
        raise NoInputError(f"{field}: user not found: {uri}; {fix}") from error
    if PATTERN & set(str(path)):
        return
    try:
        path.stat()
    except PermissionError as error:
        raise NoPermissionError(
            f"{field}: permission denied: read {path}; change the owner or mode of the folders above it"
        ) from error
    except (OSError, ValueError) as error:
        # ValueError: a name that no file can have.
        raise NoInputError(f"{field}: file or folder not found: {path}; {fix}") from error


def _ask(store: ObjectStore, field: str) -> None:
    """List something. A store in files needs a folder that can be written, or made in one."""
    parts = urlsplit(store.uri)
    if parts.scheme == "file":
        place = _existing(Path(unquote(parts.path)))
        if not place.is_dir():
            raise InvalidSpecError(field, f"expected a folder, got the file {place}")
        if not os.access(place, os.W_OK | os.X_OK):
            raise NoPermissionError(f"{field}: permission denied: write {place}; choose a folder that you can write")
    for _ in store.list("attempts/"):
        break
