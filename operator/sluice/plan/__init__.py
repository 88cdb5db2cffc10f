"""The plan: pure functions from one immutable snapshot and `now` to actions, status and events.

Nothing here reads the API, the clock, randomness or the environment. The next step always follows from what is
observed, never from a stored step counter, so a crash at any line loses nothing.
"""
