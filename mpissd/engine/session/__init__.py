"""One configuration on opened ranks."""
