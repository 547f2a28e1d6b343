"""What keeps jobs honest on clusters."""
