"""Stands in for the ranks of a chat: answers each question with its own words, slowly if asked to.

Says on stderr what it was sent. A question that holds "refuse" is refused, "die" ends the process,
"forever" is answered until a stop arrives.
"""

from __future__ import annotations

import os
import sys
import time

from mpissd.lab.chat.lines import Inbox, packed


def tell(**message: object) -> None:
    sys.stdout.buffer.write(packed(message))
    sys.stdout.buffer.flush()


def ending(ended: str, text: str, num_tokens: int) -> dict[str, object]:
    numbers = {"num_tokens": num_tokens, "num_rounds": num_tokens, "seconds": 0.5}
    told = {"ended": ended, "text": text, "summary": f"{num_tokens} tokens"}
    return {**told, **numbers, "prompt_tokens": 7, "reused": 3}


def answer(inbox: Inbox, question: str) -> None:
    words = question.split() if "forever" not in question else ["again"] * 1000
    said, ended = "", "stop_token"
    for number, word in enumerate(words):
        piece = f"{word} "
        said += piece
        tell(pieces=[[piece, "cache" if number % 2 else "bonus"]], margin="2.00 tok/round")
        message = inbox.take(0.02 if "forever" in question else 0)
        if message and "stop" in message:
            ended = "stopped"
            break
    tell(end=ending(ended, said, len(said.split())))


def main() -> int:
    inbox = Inbox(0)
    print(f"a line of the launcher: the ranks are process {os.getpid()}", flush=True)
    tell(ready="two models are ready")
    while (message := inbox.take()) is not None and "leave" not in message:
        print(f"sent: {message}", file=sys.stderr, flush=True)
        question = message.get("ask", [{"content": ""}])[-1]["content"]
        if "die" in question:
            return 5
        if "refuse" in question:
            tell(refused="the conversation has 9000 tokens")
        elif "ask" in message:
            answer(inbox, question)
    time.sleep(0.05)
    return 0


if __name__ == "__main__":
    sys.exit(main())
