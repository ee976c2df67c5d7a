"""What moves commands, parameters and gradients between the server and its workers."""
