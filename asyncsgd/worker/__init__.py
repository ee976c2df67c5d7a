"""What a worker does: gradients, exact evaluations, batches ahead of time, and what a training is measured by."""
