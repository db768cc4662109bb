"""What backends give the units: a low-cost path, a recovery path, a switch and a read-back."""
