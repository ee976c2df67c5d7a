"""The report of a study: one page, or its tables and pictures as files."""
