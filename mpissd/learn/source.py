"""Inputs of a distillation: the target, its tokenizer and template, exams, beginnings of messages.

Everything that can be wrong with them is refused here, in one line. Exams are people's prompts,
which the target answers at temperature 0, to judge or to train a draft on. Openings are how users'
messages begin, so that the target also writes prompts that it seldom starts itself. They are
general: none begins just one evaluation prompt. A word of the tokenizer after an opening leads to
subjects that a small model would not come to.
"""

import random
import re
from dataclasses import dataclass
from pathlib import Path

from mpissd.common import hf_config
from mpissd.common.errors import ConfigError
from mpissd.common.presets import files_of
from mpissd.engine.model.transformer.checkpoint import Checkpoint
from mpissd.engine.model.transformer.config import own_keys
from mpissd.engine.model.transformer.sources import open_checkpoint
from mpissd.engine.text.prompts import encoded, read_entries
from mpissd.engine.text.tokenizer import Tokenizer, load_tokenizer
from mpissd.learn.config import DistillConfig

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
# Relative frequencies of the four ways in which a user's message begins.
SHARES = {"nothing": 3, "asking": 5, "word": 6, "coding": 2}
RANKS = 20_000  # Words are looked for among this many lowest token ids, the frequent ones.
_WORD = re.compile(" [a-z]{4,}")
Prompts = list[list[int]]


@dataclass(frozen=True)
class TemplateParts:
    """The token ids that a chat template puts around messages that the model writes. before: the
    first user message. between: after a user message's `end`, before the answer. again: after an
    answer's `end`, before the next user message. end: the token that ends a message."""

    before: tuple[int, ...]
    between: tuple[int, ...]
    again: tuple[int, ...]
    end: int


def template_parts(tokenizer: Tokenizer) -> TemplateParts:
    """Derives a chat template's fixed parts from rendered conversations of one-letter messages.
    Raises ConfigError if one stop token does not end every message."""
    asked = {"role": "user", "content": "x"}
    answer = {"role": "assistant", "content": "y"}
    rendered = tokenizer.chat([asked])
    other = tokenizer.chat([{**asked, "content": "y"}])
    first = next(i for i, (a, b) in enumerate(zip(rendered, other, strict=True)) if a != b)
    after = rendered[first + 1 :]
    if not after or after[0] not in tokenizer.stop_ids:
        raise ConfigError("the chat template does not end a message with a stop token")
    both = tokenizer.chat([asked, answer, asked])[len(rendered) : -len(after)]
    if both[0] != other[first] or both[1] != after[0] or both[-1] != rendered[first]:
        raise ConfigError("the chat template changes earlier turns of a conversation")
    before = tuple(rendered[:first])
    return TemplateParts(before, tuple(after[1:]), tuple(both[2:-1]), after[0])


class Openings:
    """Draws how a user's message begins: with nothing, an opening, or an opening and a word."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.beginnings = {
            # A line break after a bar is not part of a text.
            name: [
                tuple(tokenizer.encode(text.removeprefix("\n"))) for text in texts[1:-1].split("|")
            ]
            for name, texts in {"asking": ASKING, "coding": CODING}.items()
        }
        ids = range(min(RANKS, tokenizer.vocab_size))
        words: list[tuple[int, ...]] = [(i,) for i in ids if _WORD.fullmatch(tokenizer.piece(i))]
        self.words = words or [()]

    def draw(self, choose: random.Random) -> tuple[int, ...]:
        (kind,) = choose.choices(list(SHARES), list(SHARES.values()))
        if kind == "nothing":
            return ()
        opening = choose.choice(self.beginnings["asking" if kind == "word" else kind])
        return opening + choose.choice(self.words) if kind == "word" else opening


def read_prompts(flag: str, names: str | None, tokenizer: Tokenizer) -> dict[str, Prompts]:
    """Returns {file stem: encoded prompts} of .jsonl files. names: separated by commas."""
    return {
        Path(name).stem: [
            list(encoded(where, entry, tokenizer, chat=True))
            for where, entry in read_entries(name, flag)
        ]
        for name in (names or "").split(",")
        if name
    }


@dataclass(frozen=True)
class Inputs:
    """The target's weights, tokenizer and chat template. exams: prompts that a draft is judged on,
    by name. training: prompts to train on; empty if the target writes them. draft: an earlier draft
    that is trained further, or None."""

    checkpoint: Checkpoint
    tokenizer: Tokenizer
    template: TemplateParts
    exams: dict[str, Prompts]
    training: dict[str, Prompts]
    draft: Checkpoint | None = None


def read(config: DistillConfig) -> Inputs:
    """Returns the opened inputs (target, tokenizer, prompts, earlier draft) that the flags name.
    Raises ConfigError if one cannot be used."""
    path = files_of(config.target)
    if path is None:
        raise ConfigError(f"target={config.target}: allowed: a model with weights and a tokenizer")
    checkpoint = open_checkpoint(config.target, config.seed)
    tokenizer = load_tokenizer(str(path))
    vocab = checkpoint.config.shape.vocab_size
    last = checkpoint.config.shape.num_layers - 1
    if tokenizer.vocab_size > vocab:
        sizes = f"its tokenizer has {tokenizer.vocab_size} tokens, its weights {vocab}"
        raise ConfigError(f"target={config.target}: {sizes}: allowed: the tokenizer of the weights")
    beyond = [number for number in config.layer_numbers if number > last]
    if beyond and not (config.forms or config.kinds or config.from_draft):
        raise ConfigError(f"layers={beyond[0]}: allowed: 0 to {last}")
    exams = read_prompts("prompts", config.prompts, tokenizer)
    training = read_prompts("on", config.on, tokenizer)
    draft = _draft(config) if config.from_draft else None
    return Inputs(checkpoint, tokenizer, template_parts(tokenizer), exams, training, draft)


def _draft(config: DistillConfig) -> Checkpoint:
    """Opens the draft that is trained further; raises ConfigError for one of another origin."""
    folder = files_of(str(config.from_draft))
    where = folder and folder / "config.json"
    ours = own_keys(hf_config.load(where)) if where and where.is_file() else {}
    if ours.get("embedding") != "target" or ours.get("kind"):
        allowed = "allowed: a draft that distill made and that reads tokens"
        raise ConfigError(f"from_draft={config.from_draft}: {allowed}")
    return open_checkpoint(str(config.from_draft), config.seed, config.target)
