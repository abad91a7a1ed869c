"""Translation, scoring and metrics for files and streams."""
