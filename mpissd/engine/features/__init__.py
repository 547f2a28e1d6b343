"""Features that attach to the rounds from outside."""
