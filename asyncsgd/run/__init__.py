"""The life of a run: its description, its start, its course, its end, its replay."""
