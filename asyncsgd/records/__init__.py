"""What a run leaves behind: its folder, its events, and what they add up to. It imports no torch."""
