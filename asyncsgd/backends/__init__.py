"""What computes gradients, and what time it is: one process, worker processes, ranks in step, a heap, a log."""
