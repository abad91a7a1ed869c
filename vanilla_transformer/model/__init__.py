"""The model: what is saved with a checkpoint; it imports torch, transformers and itself."""
