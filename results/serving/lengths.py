"""Writes prompts.jsonl: the chat prompts, the tokens of each, and as max_tokens the length of
SmolLM2's answer in the recording, so that loads on real and on emulated models have equal lengths.

    python results/serving/lengths.py > results/serving/prompts.jsonl
"""

from __future__ import annotations

import json
from pathlib import Path

from mpissd.engine.workload.replay.recording import load

ROOT = Path(__file__).resolve().parents[2]


def main() -> None:
    """Prints a line for each recorded prompt."""
    recording = load(str(ROOT / "results/recordings/smollm2-chat.npz"))
    lines = (ROOT / "tests/data/prompts/chat.jsonl").read_text().splitlines()
    for line, recorded in zip(lines, recording.sequences, strict=True):
        told = {"prompt_tokens": len(recorded.prompt), "max_tokens": recorded.end}
        print(json.dumps({**json.loads(line), **told}, ensure_ascii=False))


if __name__ == "__main__":
    main()
