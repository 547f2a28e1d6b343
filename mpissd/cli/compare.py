"""`compare`: prints tables and comparisons of result rows, as --show selects."""

from __future__ import annotations

from mpissd.cli.arguments import CompareConfig
from mpissd.common.errors import ConfigError
from mpissd.lab.tables import best, claims
from mpissd.lab.tables.load import find_pair, load_rows, of_one_group
from mpissd.lab.tables.pair import Pair


def compare(config: CompareConfig) -> int:
    """Prints what --show names; without it, one result over another, or the best methods.

    Raises ConfigError for results that are missing or cannot be compared.
    """
    show, named = config.show, None
    is_one = config.b is not None or (config.a is not None and "," not in config.a)
    if (show == "pair" and config.a) or (show is None and is_one):
        named = find_pair(config.a or config.out, config.b, config.out)
        show = "pair" if named or show else "best"
    if show == "pair":
        if named is None or config.a is None:
            raise ConfigError(
                f"compare: a={config.a} b={config.b}: a pair needs two results, each a run id, a "
                "runs.jsonl or a folder, or one folder that holds two configurations"
            )
        print(Pair.of(*named))
        return 0
    places_of = config.a or ("results" if show == "claims" else config.out)
    rows = of_one_group(load_rows([name for name in places_of.split(",") if name]))
    if show == "claims":
        for group in claims.tables_of(claims.claims(rows)).values():
            known = group[0].setting
            pair = f"{known['target']}/{known['draft']}"
            print(f"{pair}, {known['device_name']}, hits by {group[0].hit_law}:")
            for claim in group:
                head = ", LM head" * bool(claim.setting["lm_head"])
                print(f"  {claim.setting['acceptance']}{head}: {claim}")
        return 0
    comparisons = best.compare_methods(rows)
    if not comparisons:
        raise ConfigError(f"results {places_of!r}: no rows there")
    judged = {n: claims.judged(one.setting, rows) for n, one in enumerate(comparisons)}
    print(best.render(comparisons, judged))
    return 0
