"""Learning: advantages, losses, networks and the loops that use them."""
