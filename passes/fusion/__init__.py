"""Rules that turn a chain of ops into one fused kernel."""
