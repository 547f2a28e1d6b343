"""Replaces mpirun in tests of `serve`: one process plays the lead, and there are no ranks.

It answers "hello there" to everything, a round each FAKE_PACE_S seconds and FAKE_RUNNING requests
at a time, from FAKE_LOAD_S seconds on, and once the file FAKE_GATE exists, if it is named. Prints
its arguments, and writes its process id to the file that FAKE_PID names.
"""

import os
import sys
import time
from pathlib import Path

from mpissd.engine.text.tokenizer import load_tokenizer
from mpissd.serve.protocol import SOCKET_VARIABLE
from tests.serve.fake_lead import FakeLead, Script

VERSION = "mpirun (Open MPI) 5.0.3"


def main() -> int:
    if "--version" in sys.argv:
        print(VERSION)
        return 0
    if "die" in os.environ.get("FAKE_WAY", ""):
        print("mpissd: the weights are damaged", file=sys.stderr)
        return 4
    print("started", *sys.argv[1:], flush=True)
    Path(os.environ["FAKE_PID"]).write_text(str(os.getpid()))
    time.sleep(float(os.environ.get("FAKE_LOAD_S", "0")))
    target = next(word for word in sys.argv if word.startswith("--target=")).partition("=")[2]
    answer = [*load_tokenizer(target).encode("hello there"), 1]
    pace_s = float(os.environ.get("FAKE_PACE_S", "0.05"))
    script = Script(answer, pace_s=pace_s, max_running=int(os.environ.get("FAKE_RUNNING", "1")))
    if gate := os.environ.get("FAKE_GATE"):
        script.gate = Path(gate).exists
    fake = FakeLead(os.environ[SOCKET_VARIABLE], script)
    fake.thread.join()
    return 0


if __name__ == "__main__":
    sys.exit(main())
