"""How users' messages begin, so that the target also writes prompts that it seldom starts itself.

They are general: none begins just one evaluation prompt. A word of the tokenizer after an opening
leads to subjects that a small model would not come to.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Protocol

ASKING = """
How do I|How can I|How does|How do|How long does it take to|How much|How many|How often should I|
How would you|What is|What are|What is the best way to|What is the difference between|What should I|
What does|What happens when|What are some|What causes|What can I|What would happen if|Which|Why do|
Why does|Why is|Why are|Why did|Who was|Who|When did|When should I|Where can I|Where|Is it|Is there|
Are there|Can I|Can you explain|Can you help me|Can you|Could you|Should I|Do I need|Does|Would it|
Explain|Explain how|Explain why|Explain the difference between|Explain to a child|Describe|
Describe how|Describe a|Give me|Give me a|Give me some|Give me three|Give me five ideas for|
Tell me|Tell me about|Tell me a|Tell me how|Write a|Write an email|Write an email to|Write a letter|
Write a short|Write a short story about|Write a story|Write a poem about|Write a haiku|
Write a dialogue between|Write a paragraph about|Write a speech|Write a review|Write a description|
Write a message|Write a song|Write an introduction|Write a scene|Summarize|Summarise|Compare|List|
List three|List some|Name|Name five|Plan a|Plan|Create a|Make a|Design a|Draft a|Suggest|Suggest a|
Recommend|Help me|Help me write|Translate|Rewrite|Rephrase|Correct|Convert|Calculate|Solve|Outline|
Imagine|Pretend you are|You are a|Act as|Invent a|Come up with|Define|Teach me|Walk me through|
In simple terms,|In one paragraph,|Briefly explain|I want to|I need|I need to|I have|I have a|I am|
I'm|I'm trying to|I've been|I just|I feel|I keep|I would like|I don't understand|My|My friend|
My boss|My son|My neighbour|My computer|We are|We have|Our|There is|Every time I|Yesterday|Please|
Please write|Hi|Hello|Hey,|If|A|The|In|For|Is|Are
"""
CODING = """
Write a Python function|Write a function|Write a program|Write a script|Write a class|
Write a SQL query|Write a regular expression|In Python,|Python|How do I in Python|
What does this code|Complete the following code|Complete this Python function:

def|Fix|Refactor|Explain this code:|def|

def|from typing import List


def|import math


def|def solve(values: list) -> int:
    \"\"\"|class
"""
# The shares of ways to begin.
SHARES = {"nothing": 3, "asking": 5, "word": 6, "coding": 2}
RANKS = 20_000  # words are looked for among so many token ids: merges are numbered by frequency
_WORD = re.compile(" [a-z]{4,}")


class Words(Protocol):
    """The methods that a tokenizer must have."""

    @property
    def vocab_size(self) -> int:
        """The number of tokens."""

    def encode(self, text: str) -> list[int]:
        """Returns a text's ids."""

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of some ids."""


class Openings:
    """Draws the beginning of a user's message: nothing, an opening, an opening and a word."""

    def __init__(self, tokenizer: Words) -> None:
        self.beginnings = {
            name: [tuple(tokenizer.encode(text)) for text in _split(each)]
            for name, each in {"asking": ASKING, "coding": CODING}.items()
        }
        ids = range(min(RANKS, tokenizer.vocab_size))
        words: list[tuple[int, ...]] = [(i,) for i in ids if _WORD.fullmatch(tokenizer.decode([i]))]
        self.words = words or [()]

    def draw(self, choose: random.Random) -> tuple[int, ...]:
        """Returns the token ids of a beginning."""
        (kind,) = choose.choices(list(SHARES), list(SHARES.values()))
        if kind == "nothing":
            return ()
        opening = choose.choice(self.beginnings["asking" if kind == "word" else kind])
        return opening + choose.choice(self.words) if kind == "word" else opening


def _split(texts: str) -> list[str]:
    """Returns the texts between bars; a line break after a bar is none of theirs."""
    return [text.removeprefix("\n") for text in texts[1:-1].split("|")]
