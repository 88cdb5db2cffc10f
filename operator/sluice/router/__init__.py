"""The router's pod: a sidecar that holds the worker list, and the launcher of smg.

smg (third party, pinned) balances; the sidecar is the only writer of its worker list. The operator PUTs the
whole wanted list; the sidecar writes smg's file manifest in a volume that outlives container restarts, so a
restarted router finds its workers without operator and API server (D18). The sidecar may take workers away (another
engine run, suspect, hung, draining), it never adds one.

`worklist` decides (pure), `auth` checks who may PUT, `smg` and `agents` read smg and the agents, `files` is the shared
volume, `sidecar` ties them together, `server` is its HTTP side. `launcher.py` stands alone: it runs in smg's image,
which has nothing of this package. Nothing here may import `sluice.plan` or `sluice.runtime`.

The pod as the operator builds it: volume `run` (emptyDir) at `/run/r` in both containers; signing keys
(ConfigMap, key `jwks.json`) at `/etc/sluice/keys` in the sidecar; the sidecar is a native sidecar, so it starts
before and ends after smg; both run as the same user. The pod's routing readiness is the sidecar's `/ready`.
"""
