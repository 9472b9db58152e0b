"""From trajectories to what a gradient step sees: samples, and rows of them."""
