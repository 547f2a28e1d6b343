"""Records how two real models decode, and fits models of acceptance and cache hits ("laws").

record  answers prompts with the target and records the draft's continuations
laws    fits the laws to recordings, prints them, and writes the file for --laws (docs/laws.md)
"""
