"""The mathematics that training and skills share, on NumPy arrays and on tensors."""
