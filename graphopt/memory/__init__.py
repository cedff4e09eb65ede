"""Memory: what a training step holds and when, and plans that keep a stated budget."""
