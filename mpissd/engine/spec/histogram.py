"""Reads acceptance counts as engines report them: how many rounds accepted k = 0, 1, 2, … tokens.

counts      a JSON list, {"counts": […]}, one whole number a line, or one line with commas
mpissd      a result row, or a runs.jsonl: accept_histogram
vLLM        /metrics (spec_decode_num_drafts, …_num_accepted_tokens_per_pos), or responses with
            metrics.speculative_decoding.acceptance_histogram
SGLang      responses with meta_info.spec_accept_histogram or spec_correct_drafts_histogram
TensorRT-LLM, AIPerf: acceptance_histogram, a list or {k: rounds}

The counts of several responses (a JSON list, or one a line) are added. Where only rates are known,
as in vLLM's log lines, use --acceptance=marginal:… instead.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import Any

from mpissd.common.errors import ConfigError

_KEYS = (
    "counts",
    "accept_histogram",
    "acceptance_histogram",
    "spec_accept_histogram",
    "spec_correct_drafts_histogram",
)
_MOST = 1_000_000  # accepted tokens of a round
_DRAFTS = re.compile(r"^vllm:spec_decode_num_drafts(?:_total)?(?:\{[^}]*\})?\s+(\S+)", re.MULTILINE)
_MODEL = re.compile(r"^vllm:spec_decode_[^\n]*\bmodel_name=\"([^\"]*)\"", re.MULTILINE)
_PER_POSITION = re.compile(
    r"^vllm:spec_decode_num_accepted_tokens_per_pos(?:_total)?"
    r"\{[^}]*?position=\"(\d+)\"[^}]*\}\s+(\S+)",
    re.MULTILINE,
)


def read_histogram(path: Path) -> list[int]:
    """Reads counts of rounds with k = 0, 1, 2, … accepted tokens; raises ConfigError naming the
    file."""
    try:
        text = path.read_text("utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise ConfigError(f"cannot read {str(path)!r}: {reason}") from error
    # Each model has its own acceptance rates, so counts of several must not be added.
    if len(models := sorted(set(_MODEL.findall(text)))) > 1:
        raise ConfigError(f"{str(path)!r}: of models {', '.join(models)}: allowed: one model")
    counts = _of_metrics(text) if "vllm:spec_decode" in text else _of_text(text)
    if not counts or min(counts) < 0 or sum(counts) == 0:
        raise ConfigError(
            f"{str(path)!r}: allowed: counts of rounds with 0, 1, 2, … tokens accepted, not all 0: "
            'a JSON list, {"counts": […]}, one whole number a line, one line with commas, vLLM\'s '
            "/metrics, or responses of vLLM or SGLang with an acceptance histogram"
        )
    return counts


def _of_metrics(text: str) -> list[int] | None:
    """Reads Prometheus text: c_k = n_k − n_{k+1}, with n_0 drafts and n_i tokens accepted at
    position i.

    The counts of several engines (labels) are added. Returns None if a count is missing, or rises
    with the position.
    """
    try:
        drafts = sum(float(value) for value in _DRAFTS.findall(text))
        reached: dict[int, float] = {}
        for position, value in _PER_POSITION.findall(text):
            reached[int(position)] = reached.get(int(position), 0.0) + float(value)
    except ValueError:
        return None
    if not reached or set(reached) != set(range(len(reached))):
        return None
    if not all(map(math.isfinite, (drafts, *reached.values()))):
        return None
    at_least = [drafts, *(reached[i] for i in range(len(reached))), 0.0]
    return [round(a - b) for a, b in pairwise(at_least)]


def _of_text(text: str) -> list[int] | None:
    """Reads JSON, JSON lines or whole numbers; returns None if the text is neither."""
    lines = [line for line in text.splitlines() if line.strip()]
    try:
        try:
            data = json.loads(text)
        except ValueError:  # one value a line, or one line with commas
            data = json.loads(f"[{text}]") if len(lines) == 1 else [*map(json.loads, lines)]
        histograms = [[data]] if type(data) is int else list(_histograms(data))
    except (ValueError, TypeError, RecursionError):
        return None
    if not all(type(n) is int for counts in histograms for n in counts):
        return None
    return [sum(each) for each in zip_longest(*histograms, fillvalue=0)]


def _histograms(data: Any) -> Iterator[list[Any]]:
    """Yields every histogram inside a document, as counts by k.

    Of one object only the first key in _KEYS counts. Raises ValueError for a key with another
    value.
    """
    if isinstance(data, list) and not any(isinstance(item, (dict, list)) for item in data):
        yield data
    elif isinstance(data, list):
        for item in data:
            yield from _histograms(item)
    elif isinstance(data, dict):
        named = [data[key] for key in _KEYS if data.get(key) is not None]
        if not named:
            for item in data.values():
                if isinstance(item, dict) or _holds_objects(item):
                    yield from _histograms(item)
        elif isinstance(named[0], list):
            yield named[0]
        else:
            counts = {int(key): count for key, count in dict(named[0]).items()}
            if not 0 <= min(counts) <= max(counts) <= _MOST:
                raise ValueError(f"{max(counts)} accepted tokens")
            yield [counts.get(k, 0) for k in range(max(counts) + 1)]


def _holds_objects(item: Any) -> bool:
    return isinstance(item, list) and any(isinstance(each, (dict, list)) for each in item)
