"""Types and helpers that all parts of mpissd use; they need NumPy only."""
