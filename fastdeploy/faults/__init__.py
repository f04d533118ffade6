"""Faults on request (``--faults``): a server that fails as asked, so that trainers and clients can be tested."""
