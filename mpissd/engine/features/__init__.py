"""Optional features of decoding, of which the loops in engine/round know nothing."""
