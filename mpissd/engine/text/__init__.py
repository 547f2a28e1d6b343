"""Tokenizers, prompts, answers and grammars."""
