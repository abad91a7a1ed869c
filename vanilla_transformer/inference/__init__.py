"""From files and streams to translations, scores and metrics."""
