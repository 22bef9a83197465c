"""The demo: one system prompt, many users, with prefix sharing and without."""
