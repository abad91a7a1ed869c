"""The model: all that travels with a checkpoint; it imports torch, transformers and itself."""
