"""Checks that two models have the same vocabulary, by the text of their ordinary tokens."""

import json
from pathlib import Path

from mpissd.common.errors import ConfigError
from mpissd.common.files import read_file
from mpissd.common.gguf import is_gguf, read_gguf

_NORMAL = 1  # GGUF's type of ordinary tokens, which are neither control tokens nor padding


def check_same_tokens(target: Path, draft: Path, sizes: tuple[int, int]) -> None:
    """Raises ConfigError if target and draft have unequal numbers of ordinary tokens, or if one
    token id has different texts. sizes: the numbers of rows of the two embeddings. These are
    compared only if a model has no tokenizer file, because padding may make them differ."""
    left = tokens_of(target)
    right = tokens_of(draft)
    if left and right:
        sizes = max(left) + 1, max(right) + 1
    if sizes[0] != sizes[1]:
        raise ConfigError(
            f"target and draft have unequal vocabularies: {sizes[0]} tokens in {target.name} and "
            f"{sizes[1]} in {draft.name}: allowed: a draft with the target's tokenizer"
        )
    for number in sorted(left.keys() & right.keys()):
        if left[number] != right[number]:
            raise ConfigError(
                f"target and draft have unequal vocabularies: token {number} is "
                f"{left[number]!r} in {target.name} and {right[number]!r} in {draft.name}: "
                "allowed: a draft with the target's tokenizer"
            )


def tokens_of(path: Path) -> dict[int, str]:
    """Returns {id: text} of the tokens in a .gguf or in a folder's tokenizer.json; {} if there is
    no tokenizer. Added and special tokens are left out, since models with the same vocabulary
    rename them. Raises ConfigError for a damaged file."""
    if is_gguf(path):
        metadata = read_gguf(path).metadata
        tokens = metadata.get("tokenizer.ggml.tokens", [])
        kinds = metadata.get("tokenizer.ggml.token_type", [_NORMAL] * len(tokens))
        pairs = enumerate(zip(tokens, kinds, strict=False))
        return {number: token for number, (token, kind) in pairs if kind == _NORMAL}
    file = path / "tokenizer.json"
    try:
        tokenizer = json.loads(read_file(file))
        vocabulary = tokenizer["model"]["vocab"]
        if isinstance(vocabulary, list):  # a unigram model lists [token, score]
            vocabulary = {entry[0]: number for number, entry in enumerate(vocabulary)}
        special = {entry["id"] for entry in tokenizer.get("added_tokens") or []}
        return {number: token for token, number in vocabulary.items() if number not in special}
    except (FileNotFoundError, NotADirectoryError):  # NotADirectory: `path` is a config.json
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{str(file)!r} is damaged or no tokenizer.json") from error
