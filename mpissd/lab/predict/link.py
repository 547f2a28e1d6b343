"""The link to a rank on another host, and what messages and all-reduces take over it.

One rank is beyond the link, all others are on one host: the draft rank or, without one, the last
target rank. docs/predictions.md has the sources of the table.
"""

import re
from dataclasses import dataclass, replace

from mpissd.common.errors import ConfigError
from mpissd.engine.backend.profile import Profile
from mpissd.engine.comm.wire import HEADER, Kind
from mpissd.engine.job import Job
from mpissd.engine.law.acceptance import load_laws
from mpissd.engine.parts import link_shape
from mpissd.lab.predict.costs import EMULATED_ITEMSIZE, HostCosts, RowTable
from mpissd.lab.predict.derive import all_reduces_of


@dataclass(frozen=True)
class Link:
    """A link: one-way seconds of a message without content, and bytes/s. is_network: whether hosts
    send messages over it, too; otherwise they are on one host, and only GPUs use it."""

    name: str
    latency_s: float
    bytes_per_s: float
    is_network: bool = True

    def __str__(self) -> str:
        """Returns the name with latency and rate, such as "10g (18 µs, 1.25 GB/s)"."""
        return f"{self.name} ({self.latency_s * 1e6:.4g} µs, {self.bytes_per_s / 1e9:.4g} GB/s)"

    @property
    def delay_s(self) -> float:
        """Seconds that the link adds to a small message between two hosts."""
        return self.latency_s if self.is_network else 0.0

    def draws(self, job: Job) -> bool:
        """Returns whether drafted tokens' distributions cross the link, as tokens are sampled."""
        laws = job.config.laws
        sources = [] if laws is None else load_laws(laws).about["sources"]
        return self.is_network and any(source.get("temperature") for source in sources)

    def added_s(self, job: Job, *kinds: Kind) -> list[float]:
        """Returns, for each kind of message between rank 0 and the draft, the seconds that the link
        adds to its time on one host."""
        shape = replace(link_shape(job), vocab=job.target.vocab_size * self.draws(job))
        rate = self.bytes_per_s if self.is_network else float("inf")
        return [self.delay_s + 4 * (HEADER + shape.capacity(kind)) / rate for kind in kinds]

    def across(self, verify: RowTable, job: Job, profile: Profile) -> RowTable:
        """Returns the seconds of a job's verification by target ranks on both sides of the link.
        Each all-reduce crosses it once, and is no faster than on one host. Raises ConfigError if
        the profile knows no all-reduces."""
        reduces = all_reduces_of(profile, job.tp)
        batch = job.config.batch_size
        seconds = []
        for rows, local_s in zip(verify.rows, verify.seconds, strict=True):
            cost = job.target_shard.cost(rows, batch, EMULATED_ITEMSIZE, job.options)
            size = cost.all_reduce_bytes
            crossing_s = self.latency_s + size / self.bytes_per_s
            longer_s = max(0.0, crossing_s - reduces.all_reduce_s(job.tp, size))
            seconds.append(local_s + cost.num_all_reduces * longer_s)
        few = verify.few and self.across(verify.few, job, profile)
        return replace(verify, seconds=tuple(seconds), few=few)

    def followed(self, host: HostCosts) -> HostCosts:
        """Returns host costs with a target rank that rank 0's message reaches over the link."""
        return replace(host, follower=host.follower + self.delay_s)


LINKS: dict[str, Link | None] = {"shm": None} | {
    link.name: link
    for link in (
        Link("nvlink", 2.3e-6, 377e9, is_network=False),
        Link("pcie", 7.5e-6, 54e9, is_network=False),
        Link("ib", 1.2e-6, 25e9),
        Link("100g", 18e-6, 12.5e9),
        Link("25g", 18e-6, 3.125e9),
        Link("10g", 18e-6, 1.25e9),
    )
}


def parse_link(text: str | None, ranks: int) -> Link | None:
    """Parses the name of a link, or LATENCYus:RATE, microseconds one way and GB/s. Returns None if
    no link is named, or shm, the shared memory of one host. ranks: how many ranks it joins. Raises
    ConfigError for another text, or for fewer than two ranks."""
    if text is None:
        return None
    if ranks < 2:
        raise ConfigError(f"link={text} with {ranks} rank: allowed: with 2 or more")
    if text in LINKS:
        return LINKS[text]
    given = re.fullmatch(r"(\d+\.?\d*|\.\d+)us:(\d+\.?\d*|\.\d+)", text)
    if given is None or not float(given[2]):
        names = ", ".join(LINKS)
        raise ConfigError(f"link={text}: allowed: {names}, or as 500us:1.2 (one way, GB/s)")
    return Link(text, float(given[1]) / 1e6, float(given[2]) * 1e9)
