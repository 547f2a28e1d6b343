"""Models on one rank: shards and costs, bare matrix products, transformers, and the stepper."""
