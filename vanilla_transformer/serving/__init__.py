"""Models served to people and programs."""
