"""The test bed: a real Kubernetes on one Linux machine, without Docker and without an image registry.

Contract: imports nothing of ``sluice``; leaves nothing behind after ``close`` (or a sweep, when its owner was
killed); never reads or changes the user's kubectl context; a missing need is a ``BedError`` that names the cure,
never a skip. ``cluster.py`` is the protocol that the suites use; ``local.py`` (namespaces, real kubelets),
``api_only.py`` (API server, controllers and scheduler only) and ``existing.py`` implement it.
"""
