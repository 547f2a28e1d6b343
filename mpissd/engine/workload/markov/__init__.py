"""The `markov` workload: tokens are sampled from two language models that are known exactly."""
