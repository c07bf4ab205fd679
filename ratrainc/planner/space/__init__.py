"""The plans to consider: shapes, families, pipelines and objectives."""
