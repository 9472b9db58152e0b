"""The worlds in which skills are trained, and how a plan is followed in them."""
