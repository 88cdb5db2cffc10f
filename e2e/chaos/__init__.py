"""Scripted disturbances of a service under load on the real bed, and what they cost.

`lossless`: rows in which no request may fail. `faults`: rows in which something breaks and the damage is bounded.
The end-to-end suites assert them in short form, `make bench-lifecycle` records them with full counts.
"""
