"""The algorithm of speculative (SD) and speculative-speculative (SSD) decoding, in pure NumPy."""
