"""Limits of the system that a process may meet anywhere: which one it was, and what raises it."""

from __future__ import annotations

import errno
import os

from dlrm_api.errors import DeviceError, DLRMError

NO_THREAD = "can't start new thread"
"""Python's word for it; the libraries' is that of ``EAGAIN``."""
NO_PLACE = "No usable temporary directory found"
"""Python's word where none of its folders can be written, for want of space too."""


def named_limit(error: BaseException) -> BaseException:
    """A limit of the system that a process has met, as an error that says which to raise; any other error as it is."""
    words, number = str(error), getattr(error, "errno", None)
    if isinstance(error, DLRMError):
        return error
    if number == errno.EAGAIN or words in (NO_THREAD, os.strerror(errno.EAGAIN)):
        return DeviceError(
            f"the system lets no more threads or processes start ({words}): raise the limit, which is ulimit -u, the "
            "control group's pids.max (of a pod its kubelet's podPidsLimit) or, for threads' stacks, ulimit -v; or "
            "give fewer processesPerReplica or threadsPerProcess in spec.trainer"
        )
    if number in (errno.EMFILE, errno.ENFILE) or os.strerror(errno.EMFILE) in words:
        return DeviceError(f"the system lets no more files be opened ({words}): raise the limit (ulimit -n)")
    if NO_PLACE in words:
        return DeviceError(
            f"no folder for temporary files can be written ({words}): free space in one of these, or name another by "
            "TMPDIR"
        )
    if isinstance(error, MemoryError) or number == errno.ENOMEM or os.strerror(errno.ENOMEM) in words:
        return DeviceError(
            f"the system gives no more memory ({words or 'out of memory'}): raise the limit (ulimit -v, the pod's "
            "memory), or lower spec.trainer.tierBudgets.ddr"
        )
    return error
