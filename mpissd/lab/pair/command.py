"""The command `pair`: records a pair at temperature 0, or measures acceptance and hit models."""

from __future__ import annotations

from mpissd.common.errors import ConfigError
from mpissd.lab.pair import laws, record
from mpissd.lab.pair.config import PairConfig


def pair(config: PairConfig) -> int:
    """Writes a recording, or prints the models measured from `sources`; writes them to `to`.

    Raises ConfigError if a model, the prompts or a source cannot be read, or a file exists.
    """
    if config.sources is not None:
        laws.print_laws(config)
    elif config.to is None:
        raise ConfigError("to: needed: a new file, such as recording.npz")
    else:
        record.write(config, config.to)
    return 0
