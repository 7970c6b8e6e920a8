"""What every room shares: messages, stream ids, the two interfaces, errors and policies."""
