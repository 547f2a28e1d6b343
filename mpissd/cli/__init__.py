"""The command line: its parser, and the commands `plan`, `compare` and `--version`."""
