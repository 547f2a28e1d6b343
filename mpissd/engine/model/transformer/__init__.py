"""A decoder-only transformer with attention over a KV cache: configuration, weights, forward."""
