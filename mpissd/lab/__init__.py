"""What measures and explains."""
