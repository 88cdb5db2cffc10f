"""`kubectl sluice`: what people see of their services, and how they ask for a drain.

Reads the API with the caller's own kubeconfig and rights; writes exactly two things, both on request: the annotation
`serving.sluice.dev/drain-requested` on engine pods, and `spec.unschedulable` of a node with `--cordon`.

`plan` asks no cluster: it reads files (`modelfacts`, `catalogue`) and prints what `sluice.sizing` makes of them.

Everything else but `access`, `main`, `cluster` and the loops of `drain` is pure: objects as the API has them and `now`
go in, texts and reports come out. Status is read tolerantly, because operator and command line are upgraded at
different times. Nothing imports this package.
"""
