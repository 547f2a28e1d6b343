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
from collections.abc import Iterable, Iterator
from itertools import pairwise
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
    try:
        return _of_json(json.loads(text))
    except (ValueError, RecursionError):
        lines = text.strip().splitlines()
    if lines and lines[0].lstrip().startswith("{"):
        return _of_lines(lines)
    parts = lines[0].split(",") if len(lines) == 1 else lines
    return _whole([_integer(part.strip()) for part in parts])


def _of_lines(lines: Iterable[str]) -> list[int] | None:
    try:
        return _of_json([json.loads(line) for line in lines if line.strip()])
    except (ValueError, RecursionError):
        return None


def _of_json(data: Any) -> list[int] | None:
    if type(data) is int:
        return [data]
    if isinstance(data, list) and not any(isinstance(item, (dict, list)) for item in data):
        return _whole(data)
    histograms = list(_histograms(data))
    if not histograms or None in histograms:
        return None
    lists = [counts for counts in histograms if counts is not None]
    longest = max(map(len, lists))
    return [sum(counts[k] for counts in lists if k < len(counts)) for k in range(longest)]


def _histograms(data: Any) -> Iterator[list[int] | None]:
    """Yields every histogram inside a document; of one object only the first key in _KEYS
    counts."""
    if isinstance(data, list):
        for item in data:
            yield from _histograms(item)
    elif isinstance(data, dict):
        named = [data[key] for key in _KEYS if data.get(key) is not None]
        if named:
            yield _dense(named[0])
        else:
            for item in data.values():
                if isinstance(item, (dict, list)):
                    yield from _histograms(item)


def _dense(value: Any) -> list[int] | None:
    """Returns counts by k as a list, from a list or {k: count}; None for other values."""
    if isinstance(value, dict):
        keys = {_integer(str(key)): count for key, count in value.items()}
        if None in keys or max(map(int, keys), default=0) > 1_000_000:  # type: ignore[arg-type]
            return None
        value = [keys.get(k, 0) for k in range(max(map(int, keys), default=-1) + 1)]  # type: ignore[arg-type]
    return _whole(value) if isinstance(value, list) else None


def _whole(values: list[Any]) -> list[int] | None:
    return values if all(type(value) is int for value in values) else None


def _integer(value: str) -> int | None:
    return int(value) if value.isascii() and value.isdecimal() and len(value) < 19 else None
