"""Tokenizers, prompts, the text of answers, and grammars that restrict answers."""
