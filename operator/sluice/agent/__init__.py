"""The in-pod agent: watches one engine, proves it by real inference, and holds its pod while it drains.

Runs as the native sidecar `agent` of every engine pod (`sluice-agent`, port 9900). It has no API token and knows
nothing of other pods: it reads the engine over loopback, says what it sees (`GET /state`), answers the
engine container's probes (`/startup`, `/ready`, `/alive`) and its preStop hook (`/drain`).

The engine's pod as the operator builds it: the agent is a native sidecar with an emptyDir (medium Memory) at
`/run/sluice` and its configuration in `SLUICE_AGENT_CONFIG`; the engine container's probes and its preStop hook
(`httpGet /drain` with the header `X-Sluice-Drain`) go to port 9900; the agent itself has a liveness probe (`/healthz`)
and no preStop: it is stopped after the engine.

`verdict` decides (pure), `engine` does the I/O towards the engine, `server` the HTTP towards the pod's neighbours,
`memory` keeps the state over the agent's own restarts, `main` ties them together. Nothing here may import
`sluice.plan` or `sluice.runtime`.
"""
