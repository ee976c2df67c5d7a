"""Settings: frozen dataclasses that are flags and YAML keys at once. Standard library only."""
