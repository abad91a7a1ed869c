"""What a trained model does inside: its heads, attention, positions and embeddings."""
