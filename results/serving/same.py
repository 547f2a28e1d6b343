"""Asks a server the first prompts of prompts.jsonl at once and then one by one, and compares.

    python results/serving/same.py URL FILE

The answers of the first server that is asked go to FILE; those of others are compared with them.
Prints how many are the same; exit code 1 where one is not.
"""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.request import Request, urlopen

PROMPTS = Path(__file__).with_name("prompts.jsonl")
COUNT, TOKENS = 12, 48


def answer(url: str, prompt: str) -> str:
    """Returns the answer to a prompt at temperature 0."""
    messages = [{"role": "user", "content": prompt}]
    body = json.dumps({"messages": messages, "max_tokens": TOKENS, "temperature": 0}).encode()
    asked = Request(f"{url}/chat/completions", body, {"Content-Type": "application/json"})
    with urlopen(asked, timeout=120) as reply:
        text: str = json.load(reply)["choices"][0]["message"]["content"]
    return text


def main() -> int:
    url, file = sys.argv[1], Path(sys.argv[2])
    prompts = [json.loads(line)["prompt"] for line in PROMPTS.read_text().splitlines()[:COUNT]]
    with ThreadPoolExecutor(COUNT) as pool:
        together = list(pool.map(lambda prompt: answer(url, prompt), prompts))
    alone = [answer(url, prompt) for prompt in prompts]
    if not file.exists():
        file.write_text(json.dumps(alone, indent=1) + "\n")
    first = json.loads(file.read_text())
    same = [sum(a == b for a, b in zip(alone, others, strict=True)) for others in (together, first)]
    print(
        f"answers of {COUNT} requests alone: {same[0]} are those of the requests together, "
        f"{same[1]} those of the first way to decode"
    )
    return int(min(same) < COUNT)


if __name__ == "__main__":
    sys.exit(main())
