"""A transformer's operations on one NVIDIA GPU (compute capability 8.0 or more), in float16.

The residual stream, sums and logits are float32; weights, other activations, K and V are float16.
"""
