"""The API: models of our kinds and of what our processes say to each other.

Imports nothing of ours. `v1alpha1` (with `podtemplate`, `status` and `owned`) is what users write and read; `kinds` and
`crdgen` make the CRDs of it. `agent` and `router` are wire formats between processes, `config` is the operator's own
configuration, `conditions` the reason codes shared by conditions, Events, logs and metrics, `names` every fixed or
derived name.
"""
