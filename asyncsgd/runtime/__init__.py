"""Runtimes drive workers against a server until a budget is spent, and emit one Event per arrival."""
