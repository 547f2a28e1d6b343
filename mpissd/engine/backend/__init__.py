"""The machine's arithmetic behind few methods: numpy (oracle), cupy (GPUs), emulated (a model)."""
