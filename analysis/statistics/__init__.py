"""Statistics on plain numbers: intervals, exact tests, power, times to a target, scaling laws."""
