"""Parts of several rules; no rule is here."""
