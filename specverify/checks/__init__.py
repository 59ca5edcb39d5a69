"""One file a claim. A check says what to ask, and what the answers show; it never runs an engine itself."""
