"""The simulated engine: one process that answers, counts, drains and fails like vLLM 0.32, without an accelerator.

It stands alone (imports nothing of `sluice`), takes the command line that the operator makes for the real engine,
and adds a second port on which a test switches faults on and reads how every request ended.

Pure: `text` (tokens and answers), `kv` (blocks and prefix cache), `scheduler` (steps and their cost), `faults`
(what is armed), `protocol` (bodies in and out), `ledger`, `cli`. With I/O: `engine` (steps in real time), `metrics`,
`inference` and `server` (the engine's port), `control` (the fault port), `effects` (faults of the whole process),
`main` (start, drain, exit).
"""
