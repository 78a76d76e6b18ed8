"""One check per exercise: `checks.kv_bytes_per_token(mine)` says what is right, what is not, and what to ask."""
