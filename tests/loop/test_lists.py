"""A list of bonus candidates of its own after a hit and after a miss."""

from __future__ import annotations

import numpy as np

from mpissd.engine.comm.link import queue_link
from mpissd.engine.comm.wire import LinkShape
from mpissd.engine.decode.draft import Drafter, DraftPolicy
from mpissd.engine.decode.serve import serve
from mpissd.engine.decode.speculator import RemoteSpeculator
from mpissd.engine.spec.fanout import FanOuts
from tests.loop.harness import WAITER, Guarded, Rig, Scenario, drive


def test_hits_only_where_the_list_keeps_a_candidate() -> None:
    scenario = Scenario(batch=4, seed=11, rounds=40, backup_lookahead=2, fan_out=(6,) * 5)
    fan_outs = FanOuts((3, 3, 3, 3, 3), (5, 4, 6, 0, 0))
    rig, own = Rig(scenario), Rig(scenario)  # two workers: no stream is shared
    policy = DraftPolicy(scenario.K, fan_outs, scenario.source, scenario.backup_tokens)
    drafter = Drafter(own.draft_worker, policy, scenario.batch, WAITER)
    lead, draft = queue_link(LinkShape(3, scenario.batch, scenario.K), WAITER)
    thread = Guarded(lambda: serve((draft, drafter)))
    loop = rig.loop(RemoteSpeculator(lead))
    rows = drive(loop, scenario).sequences()
    loop.stop()
    thread.finish()
    law, seen = scenario.law(), {True: 0, False: 0}
    for id_ in range(4):
        mine = rows[rows[:, 1] == id_]
        length = 1 + np.concatenate([[0], np.cumsum(mine[:, 3] + 1)])
        for before, after, n in zip(mine, mine[1:], length, strict=False):
            k, was_hit = int(before[3]), bool(before[6])
            limit = (fan_outs.after_hit if was_hit else fan_outs.after_miss)[k]
            assert bool(after[6]) == (law.rank(id_, int(n) + k) <= limit)
            seen[was_hit] += 1
    assert min(seen.values()) > 20
