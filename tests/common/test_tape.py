"""A tape returns the appended values, from disk as from memory."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpissd.common import tape as module
from mpissd.common.tape import Tape
from tests.needs import needs_linux

Steps = st.lists(st.integers(-(2**31), 2**31 - 1) | st.none(), max_size=60)


@given(Steps, st.data())
def test_any_part_is_read_as_it_was_written(steps: list[int | None], data: st.DataObject) -> None:
    """None: the values in memory are written to the file."""
    tape, whole = Tape("i"), []
    for step in steps:
        if step is None:
            tape.spill()
        else:
            tape.append(step)
            whole.append(step)
    start = data.draw(st.integers(0, len(whole) + 2))
    stop = data.draw(st.integers(0, len(whole) + 2))
    assert tape.read(start, stop).tolist() == whole[start:stop]
    assert np.asarray(tape).tolist() == tape.read().tolist() == whole and len(tape) == len(whole)
    assert np.asarray(tape, np.float64).dtype == np.float64 and tape.read().dtype == np.int32


@needs_linux
def test_the_file_has_no_name_and_goes_with_the_tape(tmp_path: Path) -> None:
    before = set(os.listdir("/proc/self/fd"))
    with mock.patch("tempfile.tempdir", str(tmp_path)):
        tape = Tape("q")
        tape.spill()
        tape.append(1)
        tape.spill()
    assert not list(tmp_path.iterdir())
    assert len(set(os.listdir("/proc/self/fd")) - before) == 1
    del tape
    assert set(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("failing", ["open", "write"])
def test_a_full_disk_costs_memory_and_nothing_else(failing: str) -> None:
    tape = Tape("q")
    for number in (1, 2):
        tape.append(number)
    if failing == "open":
        full = OSError(errno.ENOSPC, "no space left")
        with mock.patch.object(module, "TemporaryFile", side_effect=full):
            tape.spill()
    else:
        tape.spill()
        tape._file = mock.Mock(wraps=tape._file)
        tape._file.write.side_effect = None
        tape._file.write.return_value = 3  # of 8 bytes
        tape.append(3)
        tape.spill()
    tape.append(4)
    tape.spill()
    assert tape.read().tolist() == ([1, 2, 4] if failing == "open" else [1, 2, 3, 4])
