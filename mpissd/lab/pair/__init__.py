"""Records a real pair's choices, and measures acceptance and hit models ("laws") from them.

record      answers prompts with the target and records the draft's continuations
outcomes    the rounds of a recording, or of a row of text: an entry for each sequence and round
measures    acceptance and ranks of bonus tokens, with bootstrap intervals
laws        collects sources, prints their laws, writes the file that --laws reads (docs/laws.md)
"""
