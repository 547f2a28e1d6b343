"""The command `run`: times forwards, decodes the measured rounds, and writes the result row."""
