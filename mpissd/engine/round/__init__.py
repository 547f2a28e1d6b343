"""The core: the target's round and the draft's round, and what they work on."""
