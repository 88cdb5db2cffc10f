"""The simulated engine: answers, counts, drains and fails like vLLM 0.32 or SGLang 0.5.23, without an accelerator.

It stands alone (imports nothing of `sluice`), takes the command line that the operator makes for the real engine,
and adds a second port on which a test switches faults on and reads how every request ended.

Pure: `text` (tokens and answers), `kv` (blocks, what is in them, prefix cache), `scheduler` (steps and their cost),
`leases`, `fault_catalog` and `faults` (what exists, what is armed), `protocol` (bodies in and out), `ledger`,
`config`, `hardware`, `cli` with `flags*`. With I/O: `engine` (steps in real time), `metrics` with `vllm_metrics` and
`sglang_metrics`, `inference`, `server` and `sglang_server` (the engine's port), `control` (the fault port), `effects`
(faults of the whole process), `main` (start, drain, exit). Between processes: `transfer` (what moving KV means to a
request), `nixl_*` (vLLM: pull and lease), `room_*` (SGLang: rooms), `group` and `membership` (several nodes as one).
"""
