"""How do radars send time series? IWRF packets, and the streams that they travel in."""
