"""What is learned, apart from how: one task per file; `asyncsgd.tasks.base` is the contract."""
