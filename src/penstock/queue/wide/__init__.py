"""The wide (64-bit) layout of the Fast Message Queue."""
