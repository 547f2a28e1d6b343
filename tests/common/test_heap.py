"""Arrays that come and go are of the same pages once the heap keeps them."""

from __future__ import annotations

import subprocess
import sys

from tests.needs import lack

FAULTS = """
import resource, sys
import numpy as np
from mpissd.common.heap import keep_freed

if not keep_freed():
    sys.exit(3)
for n in range(60):
    if n == 10:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    both = np.ones(49152), np.ones(49152)
    del both
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def test_arrays_are_of_pages_that_are_there() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FAULTS], capture_output=True, text=True, timeout=60
    )
    if done.returncode == 3:
        lack("a C library with mallopt")
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 100  # 9,600 where each array is of fresh pages
