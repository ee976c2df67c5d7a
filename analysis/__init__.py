"""Tables and figures from run folders. Reads what `asyncsgd.records` writes and never imports torch or transformers."""
