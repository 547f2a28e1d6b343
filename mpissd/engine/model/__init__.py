"""What one rank runs of a model: its shard and costs, its forward, and the compiled forwards."""
