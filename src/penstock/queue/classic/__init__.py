"""LROSE's Fast Message Queue, byte for byte: `.stat` and `.buf`, or System V shared memory."""
