"""A folder of runs, read and put in order: runs, plan, arms, what was registered."""
