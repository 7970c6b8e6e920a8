"""Other ways to pass messages, and Penstock's own, each behind the same few methods."""
