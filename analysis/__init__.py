"""Tables and figures from run folders. Reads what `asyncsgd.record` writes and never imports torch or transformers."""
