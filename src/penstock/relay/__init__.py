"""Copying any reader to any writer."""
