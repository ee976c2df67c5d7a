"""What a study shows, as plain values: comparisons, verdicts, sentences, tables, trust."""
