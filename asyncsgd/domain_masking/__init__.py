"""Which words are worth masking: finders, what they find in a corpus, and one spelling for its characters."""
