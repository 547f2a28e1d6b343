"""The `replay` workload: a recording of a real pair decides tokens, acceptance and cache hits."""
