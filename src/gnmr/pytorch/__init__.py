"""Units, monitor and guard for PyTorch."""
