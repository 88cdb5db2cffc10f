"""Measurements: `python -m e2e.bench [group…]` prints a table and writes `build/bench/<group>.jsonl`.

Figures are ratios or counts where that is possible: absolute times on two shared cores are noisy. Times are recorded,
never asserted; what must be exact (created once, zero writes) is also asserted by the tests.
"""
