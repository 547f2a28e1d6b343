"""What other tools read and write: nccl-tests' collectives, tidy tables, vLLM's schedules of K."""
