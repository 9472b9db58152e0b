"""What turns rewards into gradients: estimators of advantages, losses, and the presets that name both."""
