"""Measurement commands: they run and time decoding, predict its speed, and compare results."""
