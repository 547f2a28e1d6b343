"""mpissd: measure and run speculative decoding on real clusters (starts neither MPI nor CUDA)."""

__version__ = "0.1.0"
