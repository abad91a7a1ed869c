"""The commands of `vanilla-transformer`, one file each."""
