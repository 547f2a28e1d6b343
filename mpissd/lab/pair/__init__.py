"""Records how two real models decode, and fits models of acceptance and of cache hits ("laws").

record  answers prompts with the target, and records what the draft model would have drafted
laws    fits the models to recordings, prints them, and writes the file for --laws
"""
