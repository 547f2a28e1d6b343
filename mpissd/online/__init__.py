"""Drafts that learn while they draft (Online Speculative Decoding, 2310.07177); PyTorch."""
