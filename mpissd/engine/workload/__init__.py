"""What is decoded: pairs of workers (target, draft) that the decoding loops drive."""
