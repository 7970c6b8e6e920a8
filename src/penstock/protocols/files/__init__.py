"""Streams as files of other tools: Parquet, Arrow, CSV, JSON lines and MCAP."""
