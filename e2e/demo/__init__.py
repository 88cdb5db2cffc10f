"""`make demo`: from nothing to streamed tokens, with the commands that a user would type."""
