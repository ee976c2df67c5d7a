"""Losses: a model and a batch in, a loss and its number of terms out."""
