"""The commands of `vanilla-transformer`, one file each, and what they share."""
