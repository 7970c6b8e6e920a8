"""Pipelines as graphs: their description, the check, the plan of queries, and the picture."""
