"""Regression tests for ReFrame (https://reframe-hpc.readthedocs.io), whose site file knows Slurm:

    reframe --exec-policy=serial -c launch/reframe_mpissd.py -r     here, on emulated H200s
    reframe -C SITE.py -c launch/reframe_mpissd.py -r     on GPUs: partitions with the feature gpu

Ranks start by launch/local.sh in ReFrame's job, so PYTHON, MPIRUN and LAUNCHER count. The resource
`gpu` of a partition gets {num_gpus}. -S MpissdRun.tp=2 changes T.
"""

import json
from pathlib import Path

import reframe as rfm
import reframe.utility.sanity as sn
from reframe.core.backends import getlauncher
from reframe.core.builtins import parameter, run_before, sanity_function, variable

ROOT = Path(__file__).resolve().parents[1]
# What each use reaches on an emulated H200 with T = 1: tok/s, tokens a round, hit rate.
EMULATED = {"ar": (31.5, 1.0, 0.0), "sd": (99.0, 3.5, 0.0), "ssd": (105.0, 3.5, 0.697)}
SHARES = {"NVIDIA H200": 0.954}  # of the memory floor, by 8B's products (docs/performance.md)


class Mpissd(rfm.RunOnlyRegressionTest):
    """Starts a command of mpissd, and reads its row."""

    tp = variable(int, value=1)
    valid_systems = ["*"]
    valid_prog_environs = ["*"]
    time_limit = "20m"

    def start(self, ranks, script, first, *flags):
        self.is_gpu = "gpu" in self.current_partition.features
        backend = ["--backend=cupy"] if self.is_gpu else ["--backend=emulated", "--device=h200"]
        self.num_tasks = ranks
        self.extra_resources = {"gpu": {"num_gpus": ranks}} if self.is_gpu else {}
        self.job.launcher = getlauncher("local")()
        self.prerun_cmds = [f"out=$PWD; cd '{ROOT}'"]
        self.executable = script
        self.executable_opts = [str(first), *backend, *flags, '--out="$out"']

    def row(self):
        return json.loads((Path(self.stagedir) / "runs.jsonl").read_text().splitlines()[-1])

    def expect(self, **values):
        """Expects of the row's values: (reference, how far below it may be, unit) by name."""
        self.reference = {"*": {name: (*of[:2], None, of[2]) for name, of in values.items()}}
        for name, (_, _, unit) in values.items():
            value = sn.defer(self.row()[name] or 0.0)
            self.perf_variables[name] = sn.make_performance_function(value, unit)

    @sanity_function
    def is_measured(self):
        return sn.assert_gt(self.row()["tok_per_s"], 0)


@rfm.simple_test
class MpissdDoctor(Mpissd):
    @run_before("run")
    def examine(self):
        self.start(self.tp + 1, "launch/doctor.sh", f"--tp={self.tp}", "--mode=ssd", "--pair=toy")

    @sanity_function
    def is_measured(self):
        return sn.assert_found(r"^doctor: this run works", self.stdout)


@rfm.simple_test
class MpissdRun(Mpissd):
    mode = parameter(["ar", "sd", "ssd"])

    @run_before("run")
    def decode(self):
        ranks = self.tp + (self.mode != "ar")
        pair = "8b/1b" if "gpu" in self.current_partition.features else "70b/1b"
        flags = f"--mode={self.mode}", f"--pair={pair}", "--rounds=100"
        self.start(ranks, "launch/local.sh", ranks, *flags)

    @run_before("performance")
    def compare(self):
        if not self.is_gpu and self.tp == 1:
            rate, tokens, hits = EMULATED[self.mode]
            self.expect(
                tok_per_s=(rate, -0.14, "tok/s"),
                acceptance_length=(tokens, -0.01, "tokens"),
                hit_rate=(hits, -0.01, "of lookups"),
            )


@rfm.simple_test
class MpissdFloor(Mpissd):
    """8B's products on one GPU: their share of the time that reading the weights takes."""

    valid_systems = ["+gpu"]

    @run_before("run")
    def multiply(self):
        flags = "--mode=ar", "--target=8b", "--fuse", "--rounds=2000"
        self.start(1, "launch/local.sh", 1, *flags)

    @run_before("performance")
    def compare(self):
        share = SHARES.get(self.row()["device_name"])
        if share is not None:
            self.expect(floor_fraction=(share, -0.05, "of the floor"))
