"""From batches to a trained model and its checkpoints."""
