"""Opens the devices, communicators and models of the ranks, and runs decoding loops on them."""
