"""Text: prompts in, a language model's answers out."""
