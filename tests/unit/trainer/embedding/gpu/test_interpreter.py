from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def test_kernels_do_in_tritons_interpreter_what_the_tests_of_their_modules_say() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", Path(__file__).parent],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stdout + done.stderr
