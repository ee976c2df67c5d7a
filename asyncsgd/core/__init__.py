"""What decides in a run: the protocol, the server, the loop, batches, optimizers, and peers in place of a server."""
