"""The report's pictures, and those of ."""
