"""`demo.first_token_s`: `make demo` with everything built, from the command to the first streamed token."""

import os
import re
import subprocess

from e2e.bench.figures import ROOT, Recorder


def run() -> None:
    """Record the group; the demo is removed afterwards."""
    figures = Recorder("demo")
    env = {**os.environ, "CLUSTER": "local"}
    try:
        done = subprocess.run(["make", "demo"], cwd=ROOT, env=env, capture_output=True, text=True, check=False)
        found = re.search(r"First token ([\d.]+) s after the start", done.stdout)
        if done.returncode != 0 or not found:
            raise RuntimeError(f"make demo ended with {done.returncode}:\n{(done.stdout + done.stderr)[-3000:]}")
        figures.record("demo.first_token_s", float(found[1]))
    finally:
        subprocess.run(["make", "demo-down"], cwd=ROOT, env=env, check=False)
    figures.write()
