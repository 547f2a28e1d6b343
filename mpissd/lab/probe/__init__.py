"""What a machine gives a pair of models."""
