"""The report's tables: what is in them, and how they are written."""
