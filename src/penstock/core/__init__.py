"""Shared by all packages: messages, stream ids, reader and writer interfaces, errors, policies."""
