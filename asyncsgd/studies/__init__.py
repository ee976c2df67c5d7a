"""A study: its config, the plan of its runs, the sweep that makes them, and how long they take."""
