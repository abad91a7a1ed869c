"""The commands of `vanilla-transformer`, one file each, and their shared code."""
