"""What the scripts under experiments/ share: how they begin and end, their flags, their experiments."""
