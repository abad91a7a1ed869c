"""From text to batches: readers, tokenizer, BPE-dropout, token batches, the data set `phrases`."""
