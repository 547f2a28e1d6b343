"""Models: a rank's shard and its costs, the stack of matrix products, and its stepper."""
