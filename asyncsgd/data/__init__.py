"""Text to batches: corpora, tokens, masks, and which samples a batch has."""
