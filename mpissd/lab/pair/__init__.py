"""Records a real pair's choices, and measures acceptance and hit models ("laws") from them.

record  answers prompts with the target and records the draft's continuations
laws    measures sources, prints their laws, writes the file that --laws reads (docs/laws.md)
"""
