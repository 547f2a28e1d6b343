"""The commands that write or read files of other tools: export and collectives."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from mpissd.cli.configs import CollectivesConfig, ExportConfig
from mpissd.common.errors import ConfigError, unknown
from mpissd.common.row import Row
from mpissd.engine.backend.profile import known_profiles, load_profile
from mpissd.lab.interchange import nccl_tests
from mpissd.lab.interchange.tidy import FORMATS, write_tidy
from mpissd.lab.interchange.vllm_schedule import schedule
from mpissd.lab.tables import load_rows

_SHOWN = 12  # most values that an error lists


def export(config: ExportConfig) -> int:
    """Writes the rows as a table, or as the K that vLLM should use by batch size."""
    if config.to is None:
        raise ConfigError("to: needed: a file .csv, .parquet, or .json for vLLM's schedule of K")
    named, path = config.results, Path(config.to)
    folders = [Path(named)] if named else [p for p in (Path("results"), Path("out")) if p.exists()]
    rows: Sequence[Row] = load_rows(folders)
    if not rows:
        raise ConfigError(f"results {named or 'results, out'!r}: no runs*.jsonl with a row there")
    if config.where is not None:
        rows = matching(rows, config.where)
    if path.suffix in FORMATS:
        count, columns = write_tidy(rows, path)
        print(f"{path}: {count} rows, {columns} columns")
        return 0
    if path.suffix != ".json":
        raise ConfigError(f"to {config.to!r}: allowed: {', '.join(FORMATS)}, .json")
    text = json.dumps(schedule(rows))
    _write(path, text)
    print(text)
    return 0


def matching(rows: Sequence[Row], where: str) -> list[Row]:
    """Returns the rows whose keys have the given values, such as "acceptance=alpha:0.8; tp=1".

    Raises ConfigError for text that is not key=value, and for a key or value that no row has.
    """
    matched = list(rows)
    for part in filter(None, map(str.strip, where.split(";"))):
        key, is_said, value = (word.strip() for word in part.partition("="))
        if not is_said:
            raise ConfigError(f"where: {part!r}: allowed: key=value; key=value")
        held = {str(row.get(key)) for row in matched}
        if held <= {"None"} and value != "None":
            raise unknown("key of a row", key, {name for row in matched for name in row})
        matched = [row for row in matched if str(row.get(key)) == value]
        if not matched:
            some = ", ".join(sorted(held)[:_SHOWN])
            raise ConfigError(f"where: {part!r}: no such row is left: allowed: {some}")
    return matched


def collectives(config: CollectivesConfig) -> int:
    """Writes a device profile with the all-reduces that nccl-tests measured."""
    for name in ("file", "profile", "to"):
        if getattr(config, name) is None:
            raise ConfigError(f"{name}: needed: collectives FILE --profile=h100 --to=NEW.json")
    source, base, target = Path(str(config.file)), str(config.profile), Path(str(config.to))
    if target.suffix != ".json":
        raise ConfigError(f"to {config.to!r}: allowed: a .json")
    measured = nccl_tests.read(source)
    ranks = config.ranks or measured.ranks
    if ranks is None:
        raise ConfigError(f"{str(source)!r} does not say how many GPUs took part: give --ranks")
    if config.ranks and measured.ranks not in (None, config.ranks):
        raise ConfigError(f"ranks={config.ranks}: {str(source)!r} was measured on {measured.ranks}")
    load_profile(base)  # raises ConfigError if it is not valid
    text = known_profiles().get(base, Path(base)).read_text("utf-8")
    made = nccl_tests.with_all_reduces(json.loads(text), measured, ranks, source.name)
    made["name"] = target.stem
    _write(target, json.dumps(made, indent=1))
    reduce_s = load_profile(str(target)).all_reduce_s
    shown = ", ".join(f"{n >> 10} KB {reduce_s(ranks, n) * 1e6:.1f} µs" for n in (16384, 131072))
    print(f"{target}: all-reduces over {ranks} GPUs, by the fitted line: {shown}")
    return 0


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text + "\n", "utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {str(path)!r}: {error.strerror or error}") from error
