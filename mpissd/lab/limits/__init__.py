"""How near a machine's GPUs are driven to their limit."""
