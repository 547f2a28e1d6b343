"""Models as costs and as GEMMs: a rank's shard, the stack of products, and its stepping."""
