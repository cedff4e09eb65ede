"""What would help a model most on a device: precision, memory, kernels."""
