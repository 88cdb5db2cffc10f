"""Sizing: what a model needs of an accelerator, and how fast it will be. Pure arithmetic.

Facts go in (a model's config, the sizes of its files, an accelerator's figures, engine settings), reports come out.
No I/O, no clock, no torch, no transformers. Bytes are whole numbers, times are seconds as floats, GB are 10^9 bytes.

`fields` reads configs, `model`, `quantization` and `weights` turn them into parameters and bytes; `hardware` turns an
AcceleratorProfile into figures (those in `profiles/` are data that ships), `settings` engine arguments into what the
engine will do. `ledger` fills one GPU, `limits` says what no engine starts, `perf` estimates times, `workload` counts
instances for a load, `layout` compares layouts and warns, `remedies` looks for ways to a missed goal, `planning` puts
the plan together and `report` is its document, `sluice.plan/v1`. docs/sizing.md explains the method to users.

Unknown is never zero: what can't be computed is None, and a refusal needs known numbers. Any config gives a report
or a `FactsError` that names the field.
"""
