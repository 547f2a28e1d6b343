"""Formats of other tools: nccl-tests' results, flat tables of rows, and vLLM's schedules of K."""
