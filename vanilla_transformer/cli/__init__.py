"""The commands of `vanilla-transformer`, a file each."""
