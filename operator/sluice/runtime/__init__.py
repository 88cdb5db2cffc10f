"""Everything with I/O: the API client, store, queue, executor, observer, Lease, probes and metrics.

Nothing here decides what a service should look like; that is `sluice.plan`. Nothing here knows kopf; that is
`sluice.kopfapp`. Whatever must survive a restart is on the API server, never in these objects.
"""
