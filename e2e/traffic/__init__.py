"""OpenAI traffic that counts what became of every request; see `driver`."""
