"""Open-loop load: requests arrive when they arrive, whatever the server is doing, and each one's
times are taken from its arrival on."""
