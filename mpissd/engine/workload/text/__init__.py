"""Text: prompts in, and out what a language model answers to them."""
