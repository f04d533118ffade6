"""Checks of what the product promises: pauses and updates over HTTP, under load, and while processes are killed."""
