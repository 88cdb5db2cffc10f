"""Sluice: a Kubernetes operator for serving large language models without losing a request."""

__version__ = "0.1.0"
