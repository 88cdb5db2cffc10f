"""The real engine on CPU: vLLM from PyPI, as an image on the bed, run by the product (`make e2e-real`)."""
